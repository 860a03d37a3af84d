"""Schemas of the statistics of statements."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from api.schemas.common import Ratio, ResponseModel, StrictQuery
from controlplane.engine.statement_view import StatementListing
from controlplane.model.statements import (
    COUNT,
    ERRORS,
    LATENCY_COLUMNS,
    MAX_MICROSECONDS,
    MICROSECONDS,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    ROWS,
    GroupBy,
    SortKey,
    StatementQuery,
    StatementSummary,
)
from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS
from controlplane.observe.statements.store import MAX_WINDOW_SECONDS
from controlplane.observe.statements.summary import latency_quantile

_MAX_LIMIT = 1000
_QUANTILES = {"p50_seconds": 0.5, "p95_seconds": 0.95, "p99_seconds": 0.99}
_DIGEST_PATTERN = r"^[0-9a-f]{1,64}$"
Name = Annotated[str, StringConstraints(max_length=512)]


class StatementListQuery(StrictQuery):
    """Which statements a response lists."""

    window: int = Field(60, ge=1, le=MAX_WINDOW_SECONDS, description="Seconds until now.")
    sort: SortKey = Field("time", description="What comes first: the statements with the highest value.")
    limit: int = Field(20, ge=1, le=_MAX_LIMIT, description="The highest number of statements.")
    user: Name | None = Field(None, description="Only executions of this user.")
    node: Name | None = Field(None, description="Only executions on this node.")
    envoy: Name | None = Field(None, description="Only executions through this Envoy.")
    digest: Annotated[str, StringConstraints(pattern=_DIGEST_PATTERN)] | None = Field(
        None, description="Only statements whose digest is this text or begins with it."
    )
    by: GroupBy | None = Field(
        None, description="An entry per statement and user, or per statement and node."
    )

    @property
    def as_query(self) -> StatementQuery:
        return StatementQuery(**self.model_dump(exclude={"window"}))


class LatencyBucket(ResponseModel):
    """Executions in one bucket of the latency histogram."""

    up_to_seconds: float | None = Field(description="The bucket's upper bound; null: no bound.")
    count: int


class ExecutionDetails(ResponseModel):
    """The executions of one statement, or of several ones together."""

    count: int = Field(description="Executions.")
    errors: int = Field(description="Executions that ended with an error.")
    rows: int = Field(description="Rows in the results.")
    request_bytes: int
    response_bytes: int
    seconds: float = Field(description="Time from the requests to the end of the responses, in total.")
    share: Ratio = Field(description="The part of the time of all matching statements, from 0 to 1.")
    average_seconds: float | None
    p50_seconds: float | None = Field(description="An estimate from the latency histogram.")
    p95_seconds: float | None
    p99_seconds: float | None
    max_seconds: float
    per_second: float = Field(description="Executions per second.")
    users: list[str] = Field(description="The users with the most time, at most 20.")
    nodes: list[str] = Field(description="The nodes with the most time, at most 20.")
    latency: list[LatencyBucket]


class StatementDetails(ExecutionDetails):
    """The executions of one statement."""

    digest: str = Field(description="TiDB's digest of the statement.")
    text: str | None = Field(description="The statement without its values; null if it is no longer known.")
    user: str | None = Field(description="With `by=user`: the user of these executions.")
    node: str | None = Field(description="With `by=node`: the node of these executions.")


class StatementList(ResponseModel):
    """The statements of a period."""

    digests: Literal["on", "off"] = Field(
        description="`off`: no statistics are collected, because `statements.digests` is off."
    )
    since: datetime = Field(description="Start of the period.")
    window_seconds: float = Field(description="Length of the period.")
    total: int = Field(description="Matching statements, also those beyond `limit`.")
    statements: list[StatementDetails]
    others: ExecutionDetails = Field(description="All statements that have no digest or no row of their own.")
    incomplete: list[str] = Field(description="What is missing, a sentence each.")


def build_statement_list(listing: StatementListing) -> StatementList:
    """Return the response for a listing."""
    summaries = listing.summaries
    return StatementList.model_validate(
        {
            "digests": "on" if listing.is_on else "off",
            "since": listing.since,
            "window_seconds": round(listing.window_seconds, 1),
            "total": summaries.total,
            "statements": [
                _details(summary)
                | {
                    "digest": summary.digest,
                    "text": summary.text,
                    "user": summary.user,
                    "node": summary.node,
                }
                for summary in summaries.statements
            ],
            "others": _details(summaries.others),
            "incomplete": listing.incomplete,
        }
    )


def _details(summary: StatementSummary) -> dict[str, Any]:
    counts = summary.counts
    seconds, max_seconds = counts[MICROSECONDS] / 1e6, counts[MAX_MICROSECONDS] / 1e6
    latency = counts[LATENCY_COLUMNS]
    quantiles = {name: latency_quantile(q, latency, max_seconds) for name, q in _QUANTILES.items()}
    return {
        "count": int(counts[COUNT]),
        "errors": int(counts[ERRORS]),
        "rows": int(counts[ROWS]),
        "request_bytes": int(counts[REQUEST_BYTES]),
        "response_bytes": int(counts[RESPONSE_BYTES]),
        "seconds": seconds,
        "share": summary.share,
        "average_seconds": seconds / counts[COUNT] if counts[COUNT] else None,
        **quantiles,
        "max_seconds": max_seconds,
        "per_second": summary.per_second,
        "users": summary.users,
        "nodes": summary.nodes,
        "latency": _buckets(latency),
    }


def _buckets(latency: Sequence[float]) -> list[dict[str, Any]]:
    bounds = (*LATENCY_BOUNDS_SECONDS, None)
    return [
        {"up_to_seconds": bound, "count": int(count)} for bound, count in zip(bounds, latency, strict=True)
    ]

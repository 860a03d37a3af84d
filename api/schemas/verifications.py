"""Schemas of the verification of a node: its comparison with an old node."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from api.schemas.common import ResponseModel, attribute
from controlplane.model.comparison import FindingKind


class LatencyDetails(ResponseModel):
    """Latencies of the pairs that succeeded on both nodes, and the number of pairs that failed."""

    median_us: float | None = Field(description="Microseconds; null if no pair succeeded.")
    p95_us: float | None
    mean_us: float | None
    errors: int


class ComparedStatement(ResponseModel):
    """The statements of one digest on the old node and on the new one."""

    digest: str | None = Field(description="Null: commands without a statement.")
    text: str | None = Field(description="Normalized, and shortened; null if it is not known.")
    statements: int = Field(description="Executions on the old node.")
    pairs: int = Field(description="Executions on both nodes.")
    old: LatencyDetails
    new: LatencyDetails
    ratio: float | None = Field(
        description="How many times as long a statement takes on the new node; null with too few pairs."
    )
    ratio_low: float | None = Field(description="Lower bound of the 95 % confidence interval of `ratio`.")
    ratio_high: float | None
    differing_results: int = Field(description="Pairs without an error whose rows differ.")


class ErrorDifference(ResponseModel):
    """An error that executions of a statement get on one node only."""

    digest: str | None
    code: int
    count: int = Field(description="Pairs that get this error on one node only.")
    other_count: int = Field(description="Pairs of this statement that get it on the other node.")


class ComparisonSums(ResponseModel):
    """Sums over all statements."""

    old_statements: int
    new_statements: int
    pairs: int
    missing: int = Field(description="Statements that ran on the old node only.")
    extra: int = Field(description="Statements that ran on the new node only.")
    old_dropped: int = Field(description="Results that could not be written.")
    new_dropped: int
    differing_results: int
    old: LatencyDetails
    new: LatencyDetails
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None


class VerificationFinding(ResponseModel):
    """One difference between the nodes."""

    kind: FindingKind
    digest: str | None
    message: str = Field(description="The difference as a sentence.")
    is_blocking: bool = Field(description="Whether the rollout pauses because of it.")


class VerificationDetails(ResponseModel):
    """The latest comparison of an upgraded node with an old one."""

    node: str = Field(description="The upgraded node.")
    baseline: str = Field(description="The old node.")
    at: datetime = Field(description="When the replays began.")
    capture: str
    max_ratio: float
    has_passed: bool
    findings: list[VerificationFinding] = Field(description="Blocking ones first.")
    totals: ComparisonSums = attribute("comparison.totals")
    digests: list[ComparedStatement] = attribute(
        "comparison.digests", "Those with new errors first, then those that have become slowest; at most 30."
    )
    digest_count: int = Field(description="The number of all digests.")
    new_errors: list[ErrorDifference] = attribute("comparison.new_errors")
    gone_errors: list[ErrorDifference] = attribute("comparison.gone_errors")

"""The pages of statements: those that take the most time, and a page per statement with its latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Path, Request, Response

from api.console import pages, table
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from api.problems import ProblemError, ProblemKind
from api.schemas.statements import StatementList, build_statement_list
from controlplane.engine.engine import Engine
from controlplane.model.statements import GroupBy, SortKey, StatementQuery

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_PATH = "/console/statements"
_MAX_STATEMENTS = 50
_DEFAULT_WINDOW = 300
_DigestPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]

WINDOWS: Mapping[int, str] = {
    60: "the last minute",
    300: "the last 5 minutes",
    900: "the last 15 minutes",
    3600: "the last hour",
}
"""The periods that can be chosen, in seconds."""


@dataclass(frozen=True, slots=True)
class StatementPageQuery:
    """The period, order and filter in the URL of a page."""

    window: int = _DEFAULT_WINDOW
    sort: SortKey = "time"
    user: str = ""
    node: str = ""

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> StatementPageQuery:
        """Parse the query parameters. Invalid values count as absent."""
        windows = {str(seconds): seconds for seconds in WINDOWS}
        sorts: Mapping[str, SortKey] = {sort: sort for sort in get_args(SortKey)}
        return cls(
            window=windows.get(params.get("window", ""), _DEFAULT_WINDOW),
            sort=sorts.get(params.get("sort", ""), "time"),
            user=params.get("user", "").strip()[: table.MAX_QUERY_LENGTH],
            node=params.get("node", "").strip()[: table.MAX_QUERY_LENGTH],
        )

    def sorted_by(self, sort: SortKey) -> StatementPageQuery:
        """Return the query for a click on a column header."""
        return replace(self, sort=sort)

    def link(self, path: str = _PATH) -> str:
        """Return the URL of a page, without default values."""
        return table.search_link(
            path,
            window=str(self.window) if self.window != _DEFAULT_WINDOW else "",
            sort=self.sort if self.sort != "time" else "",
            user=self.user,
            node=self.node,
        )


async def _list(
    engine: Engine, query: StatementPageQuery, digest: str | None = None, by: GroupBy | None = None
) -> StatementList:
    statement_query = StatementQuery(
        sort=query.sort,
        limit=_MAX_STATEMENTS,
        user=query.user or None,
        node=query.node or None,
        digest=digest,
        by=by,
    )
    return build_statement_list(await engine.statements.list(statement_query, query.window))


@router.get(_PATH)
async def show_statements(request: Request, engine: EngineDep) -> Response:
    """Show the statements with the highest values in a column."""
    query = StatementPageQuery.from_params(request.query_params)
    values = {"listing": await _list(engine, query), "query": query}
    return pages.live_page(
        request, "statements.html", "statements", query.link(), values, windows=WINDOWS, query=query
    )


@router.get(f"{_PATH}/{{digest}}")
async def show_statement(request: Request, engine: EngineDep, digest: _DigestPath) -> Response:
    """Show one statement: by user, by node, and its latencies."""
    query = StatementPageQuery.from_params(request.query_params)
    listing = await _list(engine, query, digest)
    if not listing.statements and listing.digests == "on":
        text = f"this statement has not run in {WINDOWS[query.window]}, or takes too little time to be listed"
        raise ProblemError(ProblemKind.NOT_FOUND, text)
    values: dict[str, Any] = {
        "listing": listing,
        "statement": listing.statements[0] if listing.statements else None,
        "users": (await _list(engine, query, digest, "user")).statements,
        "nodes": (await _list(engine, query, digest, "node")).statements,
        "query": query,
    }
    link = query.link(pages.statement_link(digest))
    return pages.live_page(
        request, "statement.html", "statements", link, values, windows=WINDOWS, digest=digest, query=query
    )

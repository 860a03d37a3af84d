"""The table of nodes: its rows, their filtering, sorting, and pagination; text search. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from api.console.charts import History
from controlplane.decide.session_counts import session_count
from controlplane.decide.views import ejecting_reports
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan

ROWS_PER_PAGE = 50
MAX_QUERY_LENGTH = 256


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node in the table."""

    node_plan: NodePlan
    sessions: int | None  # over all Envoys; None if unknown
    rate: float | None = None  # commands per second at the last sample
    p95: float | None = None  # seconds
    ejected_by: int = 0  # number of Envoys that have ejected the node

    @property
    def address(self) -> str:
        return self.node_plan.node.address

    @property
    def state(self) -> State:
        return self.node_plan.state


class SortColumn(Enum):
    """The columns that the table can be sorted by."""

    NODE = "node"
    STATE = "state"
    SESSIONS = "sessions"
    RATE = "rate"
    P95 = "p95"
    WEIGHT = "weight"
    VERSION = "version"


def read_search_text(params: Mapping[str, str]) -> str:
    """Return the query parameter `text`, truncated to a sensible length."""
    return params.get("text", "").strip()[:MAX_QUERY_LENGTH]


def contains_text(text: str, values: Iterable[str]) -> bool:
    """Whether one of the values contains the text, regardless of case."""
    needle = text.casefold()
    return not needle or any(needle in value.casefold() for value in values)


def search_link(path: str, **params: str) -> str:
    """Return the link to a page with query parameters, without the empty ones."""
    return f"{path}?" + urlencode({name: value for name, value in params.items() if value})


def _natural_key(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders numbers in a text by value: `tidb-9` before `tidb-10`."""
    return [
        (not digits, int(digits or 0), letter) for digits, letter in re.findall(r"([0-9]+)|([^0-9])", text)
    ]


# States that need attention come first.
_STATES_BY_URGENCY = (State.UNHEALTHY, State.DRAINING, State.DRAINED, State.JOINING, State.GONE, State.ACTIVE)
_SORT_KEYS: Mapping[SortColumn, Callable[[NodeRow], Any]] = {
    SortColumn.NODE: lambda row: _natural_key(row.address),
    SortColumn.STATE: lambda row: _STATES_BY_URGENCY.index(row.state),
    SortColumn.SESSIONS: lambda row: row.sessions,
    SortColumn.RATE: lambda row: row.rate,
    SortColumn.P95: lambda row: row.p95,
    SortColumn.WEIGHT: lambda row: row.node_plan.weight,
    SortColumn.VERSION: lambda row: _natural_key(row.node_plan.version),
}


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The filter, sort order, and page number in the URL of the page."""

    text: str = ""  # searched in address, reason, version, group, zone, and labels
    state: State | None = None  # None for any state
    sort: SortColumn = SortColumn.NODE
    descending: bool = False
    page: int = 1

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> TableQuery:
        """Parse the query parameters. Invalid values count as absent."""
        states = {state.value: state for state in State}
        sorts = {sort.value: sort for sort in SortColumn}
        page = params.get("page", "")
        return cls(
            text=read_search_text(params),
            state=states.get(params.get("state", "")),
            sort=sorts.get(params.get("sort", ""), SortColumn.NODE),
            descending=params.get("order") == "descending",
            page=max(1, int(page)) if page.isascii() and page.isdecimal() and len(page) < 7 else 1,
        )

    def sorted_by(self, sort: SortColumn) -> TableQuery:
        """Return the query for a click on a column header: sort by it, or reverse its order."""
        return replace(self, sort=sort, descending=sort is self.sort and not self.descending, page=1)

    def at_page(self, page: int) -> TableQuery:
        """Return the query for another page."""
        return replace(self, page=page)

    @property
    def link(self) -> str:
        """The URL of the page, without default values."""
        return search_link(
            "/",
            text=self.text,
            state=self.state.value if self.state else "",
            sort=self.sort.value if self.sort is not SortColumn.NODE else "",
            order="descending" if self.descending else "",
            page=str(self.page) if self.page > 1 else "",
        )


@dataclass(frozen=True, slots=True)
class TablePage:
    """The rows of one page, and the totals over all pages."""

    rows: Sequence[NodeRow]
    query: TableQuery
    pages: int
    match_count: int  # rows on all pages
    max_sessions: int  # the maximum over all nodes, so that the bars on all pages have the same scale


def build_rows(plan: Plan, facts: Facts, history: History, now: float) -> list[NodeRow]:
    """Build the rows of all nodes."""
    ejection_counts = Counter(
        address for report in ejecting_reports(facts, now) for address in report.ejections
    )
    rows = []
    for address, node_plan in plan.nodes.items():
        latest = history.latest(address)
        rate, p95 = (latest.rate, latest.p95) if latest else (None, None)
        sessions = session_count(address, node_plan.endpoint, facts)
        rows.append(NodeRow(node_plan, sessions, rate, p95, ejection_counts[address]))
    return rows


def paginate(all_rows: Iterable[NodeRow], query: TableQuery, per_page: int = ROWS_PER_PAGE) -> TablePage:
    """Return the requested page of the matching rows, or the last page if the number is too high."""
    row_list = list(all_rows)
    matching = _sorted_rows([row for row in row_list if _matches(row, query)], query)
    pages = max(1, -(-len(matching) // per_page))
    page = min(query.page, pages)
    page_rows = matching[(page - 1) * per_page : page * per_page]
    max_sessions = max((row.sessions or 0 for row in row_list), default=0)
    return TablePage(page_rows, query.at_page(page), pages, len(matching), max_sessions)


def _matches(row: NodeRow, query: TableQuery) -> bool:
    if query.state is not None and row.state is not query.state:
        return False
    return contains_text(query.text, _searchable_texts(row.node_plan))


def _searchable_texts(node_plan: NodePlan) -> Iterable[str]:
    yield from (node_plan.node.address, node_plan.reason, node_plan.version, node_plan.group, node_plan.zone)
    yield from (f"{name}={value}" for name, value in node_plan.node.labels.items())


def _sorted_rows(matching: list[NodeRow], query: TableQuery) -> list[NodeRow]:
    """Sort by the column, then by address. Unknown values come last in both directions."""
    key = _SORT_KEYS[query.sort]
    matching.sort(key=lambda row: _natural_key(row.address))
    rows_with_value = [row for row in matching if key(row) is not None]
    rows_with_value.sort(key=key, reverse=query.descending)
    return rows_with_value + [row for row in matching if key(row) is None]

"""The rows of the table of nodes: what they show, and which of them, in which order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from api.console.history import History, HistoryPoint
from controlplane.decide.session_counts import session_count
from controlplane.decide.views import ejecting_reports
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan

ROWS_PER_PAGE = 50
_MAX_QUERY_LENGTH = 256


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node in the table."""

    node_plan: NodePlan
    sessions: int | None  # of all Envoys; None: not known
    rate: float | None = None  # commands a second, lately
    p95: float | None = None  # seconds
    ejected_by: int = 0  # number of Envoys

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


# What needs a look comes first.
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
    """Which nodes are shown, and how; from the address of the page."""

    text: str = ""  # that stands in the address, the reason, the version, the group, the zone or a label
    state: State | None = None  # None: any
    sort: SortColumn = SortColumn.NODE
    descending: bool = False
    page: int = 1

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> TableQuery:
        """What was asked for; what cannot be understood is as if it had not been asked for."""
        states = {state.value: state for state in State}
        sorts = {sort.value: sort for sort in SortColumn}
        page = params.get("page", "")
        return cls(
            text=params.get("text", "").strip()[:_MAX_QUERY_LENGTH],
            state=states.get(params.get("state", "")),
            sort=sorts.get(params.get("sort", ""), SortColumn.NODE),
            descending=params.get("order") == "descending",
            page=max(1, int(page)) if page.isascii() and page.isdecimal() and len(page) < 7 else 1,
        )

    def sorted_by(self, sort: SortColumn) -> TableQuery:
        """The same nodes by that column; the other way round when they are by it already."""
        return replace(self, sort=sort, descending=sort is self.sort and not self.descending, page=1)

    def at_page(self, page: int) -> TableQuery:
        """Another page of the same."""
        return replace(self, page=page)

    @property
    def link(self) -> str:
        """The page's address, without what is as usual."""
        params = {
            "text": self.text,
            "state": self.state.value if self.state else "",
            "sort": self.sort.value if self.sort is not SortColumn.NODE else "",
            "order": "descending" if self.descending else "",
            "page": str(self.page) if self.page > 1 else "",
        }
        return "/?" + urlencode({name: value for name, value in params.items() if value})


@dataclass(frozen=True, slots=True)
class TablePage:
    """The rows of one page, and how many there are beside them."""

    rows: Sequence[NodeRow]
    query: TableQuery
    pages: int
    match_count: int  # rows on all pages
    max_sessions: int  # that any node has, for bars that can be compared


def build_rows(plan: Plan, facts: Facts, history: History, now: float) -> list[NodeRow]:
    """All nodes."""
    ejected = Counter(address for report in ejecting_reports(facts, now) for address in report.ejections)
    return [
        _build_row(planned, facts, history.latest(address), ejected[address])
        for address, planned in plan.nodes.items()
    ]


def _build_row(node_plan: NodePlan, facts: Facts, latest: HistoryPoint | None, ejected_by: int) -> NodeRow:
    count = session_count(node_plan.node.address, node_plan.endpoint, facts)
    rate, p95 = (latest.rate, latest.p95) if latest else (None, None)
    return NodeRow(node_plan, count, rate, p95, ejected_by)


def paginate(all_rows: Iterable[NodeRow], query: TableQuery, per_page: int = ROWS_PER_PAGE) -> TablePage:
    """One page of what was asked for; the last one when there are fewer pages."""
    row_list = list(all_rows)
    matching = _sorted_rows([row for row in row_list if _matches(row, query)], query)
    pages = max(1, -(-len(matching) // per_page))
    page = min(query.page, pages)
    shown = matching[(page - 1) * per_page : page * per_page]
    max_sessions = max((row.sessions or 0 for row in row_list), default=0)
    return TablePage(shown, query.at_page(page), pages, len(matching), max_sessions)


def _matches(row: NodeRow, query: TableQuery) -> bool:
    if query.state is not None and row.state is not query.state:
        return False
    needle = query.text.casefold()
    return not needle or any(needle in text.casefold() for text in _searchable_texts(row.node_plan))


def _searchable_texts(node_plan: NodePlan) -> Iterable[str]:
    yield from (node_plan.node.address, node_plan.reason, node_plan.version, node_plan.group, node_plan.zone)
    yield from (f"{name}={value}" for name, value in node_plan.node.labels.items())


def _sorted_rows(matching: list[NodeRow], query: TableQuery) -> list[NodeRow]:
    """By the column, then by address; what is not known comes last, whichever way."""
    key = _SORT_KEYS[query.sort]
    matching.sort(key=lambda row: _natural_key(row.address))
    known = [row for row in matching if key(row) is not None]
    known.sort(key=key, reverse=query.descending)
    return known + [row for row in matching if key(row) is None]


def _natural_key(text: str) -> list[tuple[int, int, str]]:
    """Numbers in a text by their size: `tidb-9` before `tidb-10`."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for letter in [*text, ""]:
        if letter.isascii() and letter.isdecimal():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, letter))
    return parts

"""The rows of the table of nodes: what they show, and which of them, in which order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from api.console.history import History, Point
from controlplane.decide.session_counts import sessions
from controlplane.decide.views import ejecting_reports
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan

PER_PAGE = 50
_LONGEST_TEXT = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One node in the table."""

    planned: NodePlan
    sessions: int | None  # of all Envoys; None: not known
    rate: float | None = None  # commands a second, lately
    p95: float | None = None  # seconds
    ejected_by: int = 0  # number of Envoys

    @property
    def address(self) -> str:
        return self.planned.node.address

    @property
    def state(self) -> State:
        return self.planned.state


class Sort(Enum):
    """The columns that the table can be sorted by."""

    NODE = "node"
    STATE = "state"
    SESSIONS = "sessions"
    RATE = "rate"
    P95 = "p95"
    WEIGHT = "weight"
    VERSION = "version"


# What needs a look comes first.
_URGENCY = (State.UNHEALTHY, State.DRAINING, State.DRAINED, State.JOINING, State.GONE, State.ACTIVE)
_KEYS: Mapping[Sort, Callable[[Row], Any]] = {
    Sort.NODE: lambda row: _natural(row.address),
    Sort.STATE: lambda row: _URGENCY.index(row.state),
    Sort.SESSIONS: lambda row: row.sessions,
    Sort.RATE: lambda row: row.rate,
    Sort.P95: lambda row: row.p95,
    Sort.WEIGHT: lambda row: row.planned.weight,
    Sort.VERSION: lambda row: _natural(row.planned.version),
}


@dataclass(frozen=True, slots=True)
class Query:
    """Which nodes are shown, and how; from the address of the page."""

    text: str = ""  # that stands in the address, the reason, the version, the group, the zone or a label
    state: State | None = None  # None: any
    sort: Sort = Sort.NODE
    descending: bool = False
    page: int = 1

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Query:
        """What was asked for; what cannot be understood is as if it had not been asked for."""
        states = {state.value: state for state in State}
        sorts = {sort.value: sort for sort in Sort}
        page = given.get("page", "")
        return cls(
            text=given.get("text", "").strip()[:_LONGEST_TEXT],
            state=states.get(given.get("state", "")),
            sort=sorts.get(given.get("sort", ""), Sort.NODE),
            descending=given.get("order") == "descending",
            page=max(1, int(page)) if page.isascii() and page.isdecimal() and len(page) < 7 else 1,
        )

    def sorted_by(self, sort: Sort) -> Query:
        """The same nodes by that column; the other way round when they are by it already."""
        return replace(self, sort=sort, descending=sort is self.sort and not self.descending, page=1)

    def at_page(self, page: int) -> Query:
        """Another page of the same."""
        return replace(self, page=page)

    @property
    def link(self) -> str:
        """The page's address, without what is as usual."""
        told = {
            "text": self.text,
            "state": self.state.value if self.state else "",
            "sort": self.sort.value if self.sort is not Sort.NODE else "",
            "order": "descending" if self.descending else "",
            "page": str(self.page) if self.page > 1 else "",
        }
        return "/?" + urlencode({name: value for name, value in told.items() if value})


@dataclass(frozen=True, slots=True)
class Page:
    """The rows of one page, and how many there are beside them."""

    rows: Sequence[Row]
    query: Query
    pages: int
    found: int  # rows on all pages
    most_sessions: int  # that any node has, for bars that can be compared


def rows(plan: Plan, facts: Facts, history: History, now: float) -> list[Row]:
    """All nodes."""
    ejected = Counter(address for report in ejecting_reports(facts, now) for address in report.ejections)
    return [
        _row(planned, facts, history.latest(address), ejected[address])
        for address, planned in plan.nodes.items()
    ]


def _row(planned: NodePlan, facts: Facts, latest: Point | None, ejected_by: int) -> Row:
    count = sessions(planned.node.address, planned.endpoint, facts)
    rate, p95 = (latest.rate, latest.p95) if latest else (None, None)
    return Row(planned, count, rate, p95, ejected_by)


def paged(all_rows: Iterable[Row], query: Query, per_page: int = PER_PAGE) -> Page:
    """One page of what was asked for; the last one when there are fewer pages."""
    every = list(all_rows)
    fitting = _sorted([row for row in every if _fits(row, query)], query)
    pages = max(1, -(-len(fitting) // per_page))
    page = min(query.page, pages)
    shown = fitting[(page - 1) * per_page : page * per_page]
    most = max((row.sessions or 0 for row in every), default=0)
    return Page(shown, query.at_page(page), pages, len(fitting), most)


def _fits(row: Row, query: Query) -> bool:
    if query.state is not None and row.state is not query.state:
        return False
    wanted = query.text.casefold()
    return not wanted or any(wanted in told.casefold() for told in _texts(row.planned))


def _texts(planned: NodePlan) -> Iterable[str]:
    yield from (planned.node.address, planned.reason, planned.version, planned.group, planned.zone)
    yield from (f"{name}={value}" for name, value in planned.node.labels.items())


def _sorted(fitting: list[Row], query: Query) -> list[Row]:
    """By the column, then by address; what is not known comes last, whichever way."""
    key = _KEYS[query.sort]
    fitting.sort(key=lambda row: _natural(row.address))
    known = [row for row in fitting if key(row) is not None]
    known.sort(key=key, reverse=query.descending)
    return known + [row for row in fitting if key(row) is None]


def _natural(text: str) -> list[tuple[int, int, str]]:
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

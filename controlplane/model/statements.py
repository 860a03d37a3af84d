"""Statistics of statements: what an Envoy's module reports, and what users see. Pure data."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS

K = TypeVar("K")
StatementCounts: TypeAlias = "array[float]"
"""Sums over executions, by the columns below. Doubles, which cannot overflow, whatever an Envoy reports."""

COUNT, ERRORS, ROWS, REQUEST_BYTES, RESPONSE_BYTES, MICROSECONDS, MAX_MICROSECONDS = range(7)
LATENCY_COLUMNS = slice(7, 7 + len(LATENCY_BOUNDS_SECONDS) + 1)
"""Executions per latency bucket, not cumulative."""
COLUMNS = LATENCY_COLUMNS.stop

SortKey = Literal["time", "count", "errors", "rows", "p95", "max"]
GroupBy = Literal["user", "node"]


class StatementKey(NamedTuple):
    """What a row of a report counts. An empty digest or user: all that have no row of their own."""

    digest: str  # TiDB's digest, 64 hexadecimal digits
    user: str
    node: str
    envoy: str


Rows: TypeAlias = Mapping[StatementKey, StatementCounts]


@dataclass(frozen=True, slots=True)
class StatementReport:
    """A report of one Envoy process. `sequence` numbers its reports; `texts` are by digest."""

    instance: str
    sequence: int
    texts: Mapping[str, str]
    rows: Rows


@dataclass(frozen=True, slots=True)
class StatementWindow:
    """The rows of a period of time, and the texts of statements by digest. A snapshot."""

    since: float
    seconds: float
    slots: tuple[Rows, ...]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StatementQuery:
    """Which statements are wanted. `digest` may be the first part of a digest."""

    sort: SortKey = "time"
    limit: int = 20
    user: str | None = None
    node: str | None = None
    envoy: str | None = None
    digest: str | None = None
    by: GroupBy | None = None  # an entry per statement and user, or per statement and node


@dataclass(frozen=True, slots=True)
class StatementSummary:
    """The executions of one statement, or of all statements that have no row of their own.

    `share` is the part of the time of all matching statements. `users` and `nodes` are those with the most
    time. `user` or `node` is set if the query splits by it.
    """

    counts: StatementCounts
    share: float
    per_second: float
    users: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    digest: str = ""
    text: str | None = None  # None: no longer known
    user: str | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class StatementSummaries:
    """The answer to a query. `total`: how many entries match, also beyond the limit."""

    statements: tuple[StatementSummary, ...]
    others: StatementSummary
    total: int


def new_counts() -> StatementCounts:
    return array("d", bytes(8 * COLUMNS))


def add_counts(one: StatementCounts, other: StatementCounts) -> StatementCounts:
    """Return the sum of two rows, as a new row."""
    total = array("d", map(float.__add__, one, other))
    total[MAX_MICROSECONDS] = max(one[MAX_MICROSECONDS], other[MAX_MICROSECONDS])
    return total


def add_to(sums: dict[K, StatementCounts], key: K, counts: StatementCounts) -> None:
    """Add a row to the sum of a key. No row is changed: a sum is a new row, or the only row of its key."""
    before = sums.get(key)
    sums[key] = counts if before is None else add_counts(before, counts)

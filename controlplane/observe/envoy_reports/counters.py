"""Stores a module's counters of one node as a row of numbers with a column for each series.

There is one row per Envoy and node: half a million of them for 5,000 nodes and 100 Envoys. So rows are small,
and a row is converted to `Traffic` only on demand.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from controlplane.model.traffic import (
    COMMANDS,
    CONNECT_FAILURES,
    DIRECTIONS,
    EMPTY_BUCKETS,
    ERRORS,
    LATENCY_BOUNDS_SECONDS,
    LOGIN_FAILURES,
    MIGRATION_RESULTS,
    NOT_MOVABLE_REASONS,
    SESSION_STATES,
    MigrationCounts,
    Traffic,
)

CounterRow: TypeAlias = "array[float]"
"""The latest values by column; -1: never reported. Doubles, as Envoy sends them."""

_NOT_REPORTED = -1.0
_BUCKET_LABELS = (*(f"{bound:g}" for bound in LATENCY_BOUNDS_SECONDS), "+Inf")
_MIGRATION_RESULT_BY_LABEL = {f"{result}/{reason}": (result, reason) for result, reason in MIGRATION_RESULTS}
_NO_LABEL_VALUES = ("",)


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """The labels of a metric family: the label besides `node`, and its possible values.

    With a second label, a value is both label values joined by a slash.
    """

    label: str = ""
    values: tuple[str, ...] = _NO_LABEL_VALUES
    second_label: str = ""


FAMILIES: Mapping[str, CounterFamily] = {
    "sessions": CounterFamily("state", SESSION_STATES),
    "sessions_pinned": CounterFamily("reason", NOT_MOVABLE_REASONS),
    "logins": CounterFamily(),
    "login_failures": CounterFamily("reason", LOGIN_FAILURES),
    "connect_failures": CounterFamily("reason", CONNECT_FAILURES),
    "commands": CounterFamily("kind", COMMANDS),
    "command_seconds_bucket": CounterFamily("le", _BUCKET_LABELS),
    "command_microseconds": CounterFamily(),
    "errors": CounterFamily("class", ERRORS),
    "bytes": CounterFamily("direction", DIRECTIONS),
    "migrations": CounterFamily("result", tuple(_MIGRATION_RESULT_BY_LABEL), second_label="reason"),
    "migration_seconds_bucket": CounterFamily("le", _BUCKET_LABELS),
    "migration_microseconds": CounterFamily(),
}


def _build_layout() -> tuple[dict[tuple[str, str], int], dict[str, slice]]:
    columns: dict[tuple[str, str], int] = {}
    column_ranges = {}
    for name, family in FAMILIES.items():
        column_ranges[name] = slice(len(columns), len(columns) + len(family.values))
        columns |= {(name, value): len(columns) + index for index, value in enumerate(family.values)}
    return columns, column_ranges


COLUMNS, _COLUMN_RANGES = _build_layout()
"""The column of a series in a row, by its family and label value."""
_SESSION_COLUMNS, _MIGRATION_COLUMNS = _COLUMN_RANGES["sessions"], _COLUMN_RANGES["migrations"]
_COMMAND_BUCKET_COLUMNS, _MIGRATION_BUCKET_COLUMNS = (
    _COLUMN_RANGES["command_seconds_bucket"],
    _COLUMN_RANGES["migration_seconds_bucket"],
)
_COMMAND_COUNT_COLUMN = COLUMNS["command_seconds_bucket", "+Inf"]


_EMPTY_ROW: CounterRow = array("d", (_NOT_REPORTED,)) * len(COLUMNS)
_NO_MIGRATIONS = _EMPTY_ROW[_MIGRATION_COLUMNS]


class NodeCounters:
    """The latest counters that the module in one Envoy reported, by node.

    Rows that snapshots share are replaced and never modified.
    """

    def __init__(self) -> None:
        self.rows: dict[str, CounterRow] = {}
        self.unshared_nodes: set[str] = set()  # nodes whose rows no snapshot shares
        self._sessions: dict[str, int] = {}  # only nodes that have some
        self._migrations: dict[str, MigrationCounts] = {}  # likewise

    def set_value(self, node: str, column: int, value: float) -> None:
        """Set the latest value of a series."""
        if node not in self.unshared_nodes:
            self.rows[node] = self.rows.get(node, _EMPTY_ROW)[:]
            self.unshared_nodes.add(node)
        self.rows[node][column] = value

    def retain(self, nodes: Set[str]) -> None:
        """Forget all nodes except these."""
        for node in self.rows.keys() - nodes:
            del self.rows[node]
            for by_node in (self._sessions, self._migrations):
                by_node.pop(node, None)
            self.unshared_nodes.discard(node)

    def snapshot(self) -> Mapping[str, CounterRow]:
        """Return the current rows, and update `sessions` and `migrations`."""
        for node in self.unshared_nodes:
            row = self.rows[node]
            self._sessions[node] = int(sum(count for count in row[_SESSION_COLUMNS] if count > 0))
            if not self._sessions[node]:
                del self._sessions[node]
            if row[_MIGRATION_COLUMNS] != _NO_MIGRATIONS:
                self._migrations[node] = _migration_counts(row)
        self.unshared_nodes.clear()
        return dict(self.rows)

    def sessions(self) -> Mapping[str, int]:
        """Return the sessions in all states by node (only nodes that have some) as of the last `snapshot`."""
        return {node: count for node, count in self._sessions.items() if node}

    def migrations(self) -> Mapping[str, MigrationCounts]:
        """Return the migration attempts by node (only nodes that have some) as of the last `snapshot`."""
        return dict(self._migrations)


def latency_buckets(rows: Mapping[str, CounterRow]) -> Mapping[str, CounterRow]:
    """Return the latency buckets of nodes that had commands, as a later baseline for `build_traffic`."""
    return {
        node: row[_COMMAND_BUCKET_COLUMNS] for node, row in rows.items() if row[_COMMAND_COUNT_COLUMN] >= 0
    }


def build_traffic(row: CounterRow, baseline: CounterRow | None) -> Traffic:
    """Convert a row. `baseline`: earlier latency buckets of the node; None: there were no commands."""
    buckets = _cumulative_buckets(row[_COMMAND_BUCKET_COLUMNS])
    baseline_buckets = EMPTY_BUCKETS if baseline is None else _cumulative_buckets(baseline)
    return Traffic(
        sessions=_counts("sessions", row),
        not_movable=_counts("sessions_pinned", row),
        logins=_count("logins", row),
        login_failures=_counts("login_failures", row),
        connect_failures=_counts("connect_failures", row),
        commands=_counts("commands", row),
        latency_buckets=buckets,
        latency_sum_seconds=_count("command_microseconds", row) / 1e6,
        recent_latency_buckets=tuple(
            max(0, count - before) for count, before in zip(buckets, baseline_buckets, strict=True)
        ),
        errors=_counts("errors", row),
        bytes=_counts("bytes", row),
        migrations=_migration_counts(row),
        migration_buckets=_cumulative_buckets(row[_MIGRATION_BUCKET_COLUMNS]),
        migration_sum_seconds=_count("migration_microseconds", row) / 1e6,
    )


def _migration_counts(row: CounterRow) -> MigrationCounts:
    counts = zip(_MIGRATION_RESULT_BY_LABEL.values(), row[_MIGRATION_COLUMNS], strict=True)
    return MappingProxyType({key: int(count) for key, count in counts if count >= 0})


def _counts(name: str, row: CounterRow) -> Mapping[str, int]:
    counts = zip(FAMILIES[name].values, row[_COLUMN_RANGES[name]], strict=True)
    return MappingProxyType({value: int(count) for value, count in counts if count >= 0})


def _count(name: str, row: CounterRow) -> int:
    return max(0, int(row[_COLUMN_RANGES[name].start]))


def _cumulative_buckets(counts: CounterRow) -> tuple[int, ...]:
    """Make counts non-decreasing: Envoy reads its counters one by one, so a later bucket may lag behind."""
    cumulative, maximum = [], 0
    for count in counts:
        maximum = max(maximum, int(count))
        cumulative.append(maximum)
    return tuple(cumulative)

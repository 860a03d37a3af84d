"""Stores the counters that a module reports for one node as a row of numbers, one column per series.

There is one row per Envoy and node, half a million for 100 Envoys and 5,000 nodes. So rows are small, and are
converted to `Traffic` only on demand.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from controlplane.model.traffic import (
    COMMANDS,
    CONNECT_FAILURES,
    DIRECTIONS,
    EMPTY_BUCKETS,
    ERRORS,
    FAILED,
    LATENCY_BOUNDS_SECONDS,
    LOGIN_FAILURES,
    MIGRATION_RESULTS,
    NOT_MOVABLE_REASONS,
    SESSION_STATES,
    MigrationCounts,
    Traffic,
)

CounterRow: TypeAlias = "array[float]"
"""The latest value of each column; -1: never reported. Envoy sends doubles."""

_NOT_REPORTED = -1.0
_BUCKET_LABELS = (*(f"{bound:g}" for bound in LATENCY_BOUNDS_SECONDS), "+Inf")


class CounterFamily(NamedTuple):
    """The labels of a metric family besides `node`, and their values (for two labels: `<value>/<value>`)."""

    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ("",)


FAMILIES: Mapping[str, CounterFamily] = {
    "sessions": CounterFamily(("state",), SESSION_STATES),
    "sessions_pinned": CounterFamily(("reason",), NOT_MOVABLE_REASONS),
    "logins": CounterFamily(),
    "login_failures": CounterFamily(("reason",), LOGIN_FAILURES),
    "connect_failures": CounterFamily(("reason",), CONNECT_FAILURES),
    "commands": CounterFamily(("kind",), COMMANDS),
    "command_seconds_bucket": CounterFamily(("le",), _BUCKET_LABELS),
    "command_microseconds": CounterFamily(),
    "errors": CounterFamily(("class",), ERRORS),
    "bytes": CounterFamily(("direction",), DIRECTIONS),
    "migrations": CounterFamily(
        ("result", "reason"),
        # The module reports a failed migration as "stayed": the session stays on its node.
        tuple(f"{'stayed' if result == FAILED else result}/{why}" for result, why in MIGRATION_RESULTS),
    ),
    "migration_seconds_bucket": CounterFamily(("le",), _BUCKET_LABELS),
    "migration_microseconds": CounterFamily(),
}

_SERIES = [(name, value) for name, family in FAMILIES.items() for value in family.values]
COLUMNS = {series: column for column, series in enumerate(_SERIES)}
"""The column of each series, by (family, label value)."""
_COLUMN_RANGES = {
    name: slice(COLUMNS[name, family.values[0]], COLUMNS[name, family.values[-1]] + 1)
    for name, family in FAMILIES.items()
}
_SESSION_COLUMNS, _MIGRATION_COLUMNS = _COLUMN_RANGES["sessions"], _COLUMN_RANGES["migrations"]
_COMMAND_BUCKET_COLUMNS = _COLUMN_RANGES["command_seconds_bucket"]
_EMPTY_ROW: CounterRow = array("d", (_NOT_REPORTED,)) * len(COLUMNS)
_NO_MIGRATIONS = _EMPTY_ROW[_MIGRATION_COLUMNS]


class NodeCounters:
    """The latest counters that the module in one Envoy reported, by node.

    A row that is part of a snapshot is copied before it is changed.
    """

    def __init__(self) -> None:
        self.rows: dict[str, CounterRow] = {}
        self.unshared_nodes: set[str] = set()  # nodes whose rows are in no snapshot
        self.sessions: dict[str, int] = {}  # by node, as of the last snapshot, without zeros
        self.migrations: dict[str, MigrationCounts] = {}  # by node, as of the last snapshot

    def set_value(self, node: str, column: int, value: float) -> None:
        if node not in self.unshared_nodes:
            self.rows[node] = self.rows.get(node, _EMPTY_ROW)[:]
            self.unshared_nodes.add(node)
        self.rows[node][column] = value

    def retain(self, nodes: Set[str]) -> None:
        """Forget all nodes except `nodes`."""
        for node in self.rows.keys() - nodes:
            del self.rows[node]
            self.sessions.pop(node, None)
            self.migrations.pop(node, None)
            self.unshared_nodes.discard(node)

    def snapshot(self) -> Mapping[str, CounterRow]:
        """Return the current rows, and update `sessions` and `migrations`."""
        for node in self.unshared_nodes:
            row = self.rows[node]
            sessions = int(sum(count for count in row[_SESSION_COLUMNS] if count > 0))
            if sessions and node:
                self.sessions[node] = sessions
            else:
                self.sessions.pop(node, None)
            if row[_MIGRATION_COLUMNS] != _NO_MIGRATIONS:
                self.migrations[node] = _migration_counts(row)
        self.unshared_nodes.clear()
        return dict(self.rows)


def latency_buckets(rows: Mapping[str, CounterRow]) -> Mapping[str, CounterRow]:
    """Return the latency buckets of all nodes that had commands, as a baseline for `build_traffic`."""
    count_column = COLUMNS["command_seconds_bucket", "+Inf"]
    return {node: row[_COMMAND_BUCKET_COLUMNS] for node, row in rows.items() if row[count_column] >= 0}


def build_traffic(row: CounterRow, baseline: CounterRow | None) -> Traffic:
    """Convert a row. "Recent" buckets count from `baseline`, the node's earlier buckets (None: zeros)."""
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
        migration_buckets=_cumulative_buckets(row[_COLUMN_RANGES["migration_seconds_bucket"]]),
        migration_sum_seconds=_count("migration_microseconds", row) / 1e6,
    )


def _migration_counts(row: CounterRow) -> MigrationCounts:
    counts = zip(MIGRATION_RESULTS, row[_MIGRATION_COLUMNS], strict=True)
    return MappingProxyType({key: int(count) for key, count in counts if count >= 0})


def _counts(name: str, row: CounterRow) -> Mapping[str, int]:
    counts = zip(FAMILIES[name].values, row[_COLUMN_RANGES[name]], strict=True)
    return MappingProxyType({value: int(count) for value, count in counts if count >= 0})


def _count(name: str, row: CounterRow) -> int:
    return max(0, int(row[_COLUMN_RANGES[name].start]))


def _cumulative_buckets(counts: CounterRow) -> tuple[int, ...]:
    """Make counts non-decreasing: Envoy reads its counters one by one, while they increase."""
    return tuple(int(max(count, 0)) for count in itertools.accumulate(counts, max))

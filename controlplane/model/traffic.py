"""Traffic counters that the Tidevoy module in an Envoy reports, by node, and their sums. Pure data.

Counters start at zero with the Envoy; session counts are current values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Counts = Mapping[str, int]
MigrationCounts = Mapping[tuple[str, str], int]  # by MIGRATION_RESULTS

# The label values that the module counts by. Others are dropped, so that no Envoy can add unlimited labels.
SESSION_STATES = ("login", "idle", "busy", "transaction", "opaque")
NOT_MOVABLE_REASONS = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")
LOGIN_FAILURES = (
    *("no_node", "too_many_connections", "tls_required", "login_too_slow", "bad_packet", "packet_too_large"),
    *("too_old", "clear_text_password", "node_without_tls", "node_tls_failed", "node_protocol"),
    *("password_unreadable", "node_gone", "compression_not_offered", "node_unreachable"),
    *("denied", "client_gone", "node_full"),
)
CONNECT_FAILURES = ("connect", "closed", "error", "invalid", "tls", "full")
# Why an Envoy ejects a node.
EJECT_REASONS = ("connect", "closed", "error", "invalid", "tls", "vanished")
COMMANDS = ("query", "prepare", "execute", "fetch", "ping", "change_user", "reset", "other")
ERRORS = ("access", "deadlock", "shutdown", "killed", "limit", "cluster", "syntax", "other")
DIRECTIONS = ("to_node", "to_client")
# How an attempt to migrate a session ended, and why.
MOVED, FAILED, LOST = "moved", "stayed", "lost"
MIGRATION_RESULTS = (
    (MOVED, "ok"),
    *((FAILED, why) for why in ("no_node", "unreachable", "slow", "denied", "not_restored", "invalid")),
    *((FAILED, why) for why in ("refused", "no_token", "states", "states_too_large", "states_budget")),
    (LOST, "lost"),
)
# Upper bounds in seconds of the latency buckets of commands and migrations; the last bucket has none.
LATENCY_BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

_EMPTY: Mapping[str, Any] = MappingProxyType({})
EMPTY_BUCKETS = (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of one node, or the sum over several. An absent label value was never counted.

    Buckets are cumulative as in Prometheus: commands that took at most the bound; the last bucket counts all.
    """

    sessions: Counts = field(default_factory=lambda: _EMPTY)  # by SESSION_STATES
    not_movable: Counts = field(default_factory=lambda: _EMPTY)  # by NOT_MOVABLE_REASONS
    logins: int = 0
    login_failures: Counts = field(default_factory=lambda: _EMPTY)
    connect_failures: Counts = field(default_factory=lambda: _EMPTY)
    commands: Counts = field(default_factory=lambda: _EMPTY)
    latency_buckets: tuple[int, ...] = EMPTY_BUCKETS
    latency_sum_seconds: float = 0.0  # total over all commands
    recent_latency_buckets: tuple[int, ...] = EMPTY_BUCKETS  # only the last one to two minutes
    errors: Counts = field(default_factory=lambda: _EMPTY)
    bytes: Counts = field(default_factory=lambda: _EMPTY)
    # Migrations of sessions away from this node; durations are those of successful ones.
    migrations: MigrationCounts = field(default_factory=lambda: MappingProxyType({}))
    migration_buckets: tuple[int, ...] = EMPTY_BUCKETS
    migration_sum_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """How many sessions the module in one Envoy has on each node, each counted at its current node.

    There is no value before a telemetry stream has reported all series. `sessions` holds the latest counts
    without zeros. For the nodes in `complete_nodes`, and only for them, an absent count is known to be zero
    as of `counting_since` or later.
    """

    at: float  # time of the latest report
    counting_since: float
    sessions: Counts = field(default_factory=lambda: _EMPTY)
    complete_nodes: Set[str] = frozenset()
    has_served: bool = True  # False: no session has been counted since the Envoy started
    instance: str = ""  # id of the Envoy process, new at each start; empty: its module does not report one


@dataclass(frozen=True, slots=True)
class ConfigRejection:
    """A configuration that the module rejected."""

    at: float
    extension: str
    text: str


@dataclass(frozen=True, slots=True)
class Ejection:
    """An Envoy ejected a node: connecting failed, and the Envoy sends no new sessions to the node."""

    envoy: str
    reason: str  # one of EJECT_REASONS
    since: float


V = TypeVar("V")


class LazyTrafficByNode(Mapping[str, Traffic], Generic[V]):
    """Traffic by node, built on each access: of thousands of nodes few are ever read."""

    def __init__(
        self,
        entries: Mapping[str, V],
        build: Callable[[str, V], Traffic],
        migrations: Mapping[str, MigrationCounts],
    ) -> None:
        """`migrations` contains only nodes that have any."""
        self._entries, self._build, self.migrations = entries, build, migrations

    def __getitem__(self, node: str) -> Traffic:
        return self._build(node, self._entries[node])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: object) -> bool:
        return node in self._entries

    def filtered(self, nodes: Set[str]) -> LazyTrafficByNode[V]:
        """Return the entries of the given nodes."""
        return LazyTrafficByNode(
            {node: entry for node, entry in self._entries.items() if node in nodes},
            self._build,
            {node: counts for node, counts in self.migrations.items() if node in nodes},
        )


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """All counters that the module in one Envoy reported in one flush of its statistics.

    `nodes` is by address; the key "" holds what belongs to no node. `rejections` counts by extension and
    text. `dropped_series` counts the series dropped since the stream began because of an unknown node or
    label value. Without `session_counts`, some series may not have been received yet. `is_first` marks the
    first flush of a stream: the age of its counts is not known.
    """

    envoy: str
    at: float
    version: str = ""
    instance: str = ""  # id of the Envoy process, new at each start; empty: not known
    nodes: Mapping[str, Traffic] = field(default_factory=lambda: _EMPTY)
    rejections: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    ejections: Mapping[str, Ejection] = field(default_factory=lambda: MappingProxyType({}))  # by node
    dropped_series: int = 0
    session_counts: SessionCounts | None = None
    is_first: bool = False

    def migrations(self) -> Mapping[str, MigrationCounts]:
        """Return the migration counts of the nodes that have any."""
        if isinstance(self.nodes, LazyTrafficByNode):
            return self.nodes.migrations
        return {node: traffic.migrations for node, traffic in self.nodes.items() if traffic.migrations}

    def filtered(self, nodes: Set[str]) -> ModuleReport:
        """Return the report limited to the given nodes."""
        if self.nodes.keys() | self.ejections.keys() <= nodes:
            return self
        ejections = {node: ejection for node, ejection in self.ejections.items() if node in nodes}
        report = replace(self, ejections=MappingProxyType(ejections))
        if isinstance(self.nodes, LazyTrafficByNode):
            return replace(report, nodes=self.nodes.filtered(nodes))
        remaining = {node: traffic for node, traffic in self.nodes.items() if node in nodes}
        return replace(report, nodes=MappingProxyType(remaining))


K = TypeVar("K", str, tuple[str, str])


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of all parts."""
    all_parts = list(parts)
    if len(all_parts) == 1:
        return all_parts[0]
    return Traffic(
        sessions=_sum_counts(part.sessions for part in all_parts),
        not_movable=_sum_counts(part.not_movable for part in all_parts),
        logins=sum(part.logins for part in all_parts),
        login_failures=_sum_counts(part.login_failures for part in all_parts),
        connect_failures=_sum_counts(part.connect_failures for part in all_parts),
        commands=_sum_counts(part.commands for part in all_parts),
        latency_buckets=_sum_buckets(part.latency_buckets for part in all_parts),
        latency_sum_seconds=sum(part.latency_sum_seconds for part in all_parts),
        recent_latency_buckets=_sum_buckets(part.recent_latency_buckets for part in all_parts),
        errors=_sum_counts(part.errors for part in all_parts),
        bytes=_sum_counts(part.bytes for part in all_parts),
        migrations=_sum_counts(part.migrations for part in all_parts),
        migration_buckets=_sum_buckets(part.migration_buckets for part in all_parts),
        migration_sum_seconds=sum(part.migration_sum_seconds for part in all_parts),
    )


def quantile(q: float, buckets: tuple[int, ...]) -> float | None:
    """Return the latency quantile `q` in seconds, or None if the buckets are empty.

    As in Prometheus's `histogram_quantile`, the value is interpolated linearly between two bounds and never
    exceeds the last bound.
    """
    if not buckets[-1]:
        return None
    rank = q * buckets[-1]
    count_below, lower = 0, 0.0
    for count, upper in zip(buckets, LATENCY_BOUNDS_SECONDS, strict=False):
        if count >= rank:
            if count <= count_below:
                return upper
            return lower + (upper - lower) * (rank - count_below) / (count - count_below)
        count_below, lower = count, upper
    return LATENCY_BOUNDS_SECONDS[-1]


def migrations_by_reason(migrations: MigrationCounts, result: str) -> Counts:
    """Return the migrations with the given result, by reason."""
    return {reason: count for (outcome, reason), count in migrations.items() if outcome == result}


def _sum_counts(mappings: Iterable[Mapping[K, int]]) -> Mapping[K, int]:
    sums: dict[K, int] = {}
    for counts in mappings:
        for key, count in counts.items():
            sums[key] = sums.get(key, 0) + count
    return MappingProxyType(sums)


def _sum_buckets(buckets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(EMPTY_BUCKETS, *buckets, strict=True)))

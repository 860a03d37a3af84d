"""What Tidevoy's module in an Envoy tells of the traffic: counts by node, and their sums. Pure data.

Counters count since that Envoy started; sessions are those of now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Counts = Mapping[str, int]
MigrationCounts = Mapping[tuple[str, str], int]  # by MOVES

# The words that the module counts by. Others are not taken over, so that nothing an Envoy sends can grow.
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
# How a try to move a session away from its node ended, and why.
MOVED, FAILED, LOST = "moved", "stayed", "lost"
MIGRATION_RESULTS = (
    (MOVED, "ok"),
    *((FAILED, why) for why in ("no_node", "unreachable", "slow", "denied", "not_restored", "invalid")),
    *((FAILED, why) for why in ("refused", "no_token", "states", "states_too_large", "states_budget")),
    (LOST, "lost"),
)
# Upper bounds of the buckets of a command's latency, and of a move's, in seconds; the last bucket has none.
LATENCY_BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

_EMPTY: Mapping[str, Any] = MappingProxyType({})
EMPTY_BUCKETS = (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one node, or of several. A word that is not there was never counted.

    `buckets` are cumulative, as Prometheus has them: commands that took at most that bound, the last all.
    """

    sessions: Counts = field(default_factory=lambda: _EMPTY)  # by STATES
    not_movable: Counts = field(
        default_factory=lambda: _EMPTY
    )  # sessions that cannot be moved, by PIN_REASONS
    logins: int = 0
    login_failures: Counts = field(default_factory=lambda: _EMPTY)
    connect_failures: Counts = field(default_factory=lambda: _EMPTY)
    commands: Counts = field(default_factory=lambda: _EMPTY)
    latency_buckets: tuple[int, ...] = EMPTY_BUCKETS
    latency_sum_seconds: float = 0.0  # that all commands together took
    recent_latency_buckets: tuple[int, ...] = EMPTY_BUCKETS  # as `buckets`, of the last minute or two only
    errors: Counts = field(default_factory=lambda: _EMPTY)
    bytes: Counts = field(default_factory=lambda: _EMPTY)
    migrations: MigrationCounts = field(
        default_factory=lambda: MappingProxyType({})
    )  # of sessions that were on this node
    migration_buckets: tuple[int, ...] = EMPTY_BUCKETS  # as `buckets`, of those that moved
    migration_sum_seconds: float = 0.0  # that these together took


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """How many sessions the module in one Envoy has on each node: all of them, at the node where they are.

    There is none before a stream has told all that there is. `sessions` holds the latest numbers, without
    those that are zero. What is not in it is known to be zero, as of `began` or later, for the nodes in
    `covered` alone.
    """

    at: float  # of the latest word
    counting_since: float
    sessions: Counts = field(default_factory=lambda: _EMPTY)
    complete_nodes: Set[str] = frozenset()
    has_served: bool = True  # False: it has counted no session since its Envoy started
    instance: str = ""  # of the Envoy's process, new with each; empty: its module does not say


@dataclass(frozen=True, slots=True)
class ConfigRejection:
    """A configuration that the module would not take."""

    at: float
    extension: str
    text: str


@dataclass(frozen=True, slots=True)
class Ejection:
    """An Envoy has ejected a node: its attempts to use the node failed, and it gives it no new sessions."""

    envoy: str
    reason: str  # of EJECT_REASONS
    since: float


V = TypeVar("V")


class LazyTrafficByNode(Mapping[str, Traffic], Generic[V]):
    """Traffic by node, made of what is known whenever somebody looks: of thousands hardly anybody does."""

    def __init__(
        self,
        entries: Mapping[str, V],
        build: Callable[[str, V], Traffic],
        migrations: Mapping[str, MigrationCounts],
    ) -> None:
        """`moves` are those of the nodes that have some."""
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
        """Those of some nodes."""
        kept = {node: each for node, each in self._entries.items() if node in nodes}
        return LazyTrafficByNode(
            kept, self._build, {node: each for node, each in self.migrations.items() if node in nodes}
        )


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What the module in one Envoy has told up to a moment, with all counters of a flush.

    `nodes` is by address; under "" stands what belongs to no node. `refusals` counts by extension and text.
    `dropped` are the series that were left out since the stream began, for an unknown node or word. Without
    a `census`, a part of what there is may still be to come. `is_first`: it is of a stream's first flush, and
    nobody knows how old its counts are.
    """

    envoy: str
    at: float
    version: str = ""
    instance: str = ""  # of the Envoy's process, new with each; empty: not known
    nodes: Mapping[str, Traffic] = field(default_factory=lambda: _EMPTY)
    rejections: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    ejections: Mapping[str, Ejection] = field(default_factory=lambda: MappingProxyType({}))  # by node
    dropped_series: int = 0
    session_counts: SessionCounts | None = None
    is_first: bool = False

    def migrations(self) -> Mapping[str, MigrationCounts]:
        """The moves of nodes that have some."""
        if isinstance(self.nodes, LazyTrafficByNode):
            return self.nodes.migrations
        return {node: part.migrations for node, part in self.nodes.items() if part.migrations}

    def filtered(self, nodes: Set[str]) -> ModuleReport:
        """It without what it has of other nodes."""
        if self.nodes.keys() | self.ejections.keys() <= nodes:
            return self
        ejections = {node: each for node, each in self.ejections.items() if node in nodes}
        report = replace(self, ejections=MappingProxyType(ejections))
        if isinstance(self.nodes, LazyTrafficByNode):
            return replace(report, nodes=self.nodes.filtered(nodes))
        kept = {node: part for node, part in self.nodes.items() if node in nodes}
        return replace(report, nodes=MappingProxyType(kept))


K = TypeVar("K", str, tuple[str, str])


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    """The sum of all parts."""
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
    """Seconds within which that share of the commands was answered; None when there was none.

    Between two bounds it is a guess on a straight line, and never more than the last bound, as Prometheus's
    `histogram_quantile` does it.
    """
    if not buckets[-1]:
        return None
    rank = q * buckets[-1]
    below, lower = 0, 0.0
    for count, upper in zip(buckets, LATENCY_BOUNDS_SECONDS, strict=False):
        if count >= rank:
            return lower + (upper - lower) * (rank - below) / (count - below) if count > below else upper
        below, lower = count, upper
    return LATENCY_BOUNDS_SECONDS[-1]


def migrations_by_reason(migrations: MigrationCounts, result: str) -> Counts:
    """The moves that had that result, by why."""
    return {reason: count for (had, reason), count in migrations.items() if had == result}


def _sum_counts(each: Iterable[Mapping[K, int]]) -> Mapping[K, int]:
    sums: dict[K, int] = {}
    for counts in each:
        for word, count in counts.items():
            sums[word] = sums.get(word, 0) + count
    return MappingProxyType(sums)


def _sum_buckets(each: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(EMPTY_BUCKETS, *each, strict=True)))

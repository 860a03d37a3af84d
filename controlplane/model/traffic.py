"""Traffic counters of each node, as the Tidevoy module in an Envoy reports them, and their sums. Pure data.

Counters start at zero when the Envoy starts; session counts are current values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from controlplane.model.capture import CaptureCounts
from controlplane.model.limits import LimitUsage
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rules import RuleHits

Counts = Mapping[str, int]
MigrationCounts = Mapping[tuple[str, str], int]  # keys: MIGRATION_RESULTS

# Label values that the module reports. Others are dropped: an Envoy must not add unlimited label values.
SESSION_STATES = ("login", "idle", "busy", "transaction", "opaque")
NOT_MOVABLE_REASONS = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")
LOGIN_FAILURES = (
    *("no_node", "too_many_connections", "tls_required", "login_too_slow", "bad_packet", "packet_too_large"),
    *("too_old", "clear_text_password", "node_without_tls", "node_tls_failed", "node_protocol"),
    *("password_unreadable", "node_gone", "compression_not_offered", "node_unreachable"),
    *("session_token_plugin", "attributes_too_large", "change_user_without_tls"),
    *("too_many_logins", "too_many_logins_of_address", "too_many_decryptions", "envoy_draining"),
    *("fleet_limit", "network_limit", "user_limit", "connection_rate", "user_connection_rate"),
    *("denied", "client_gone", "node_full"),
)
CONNECT_FAILURES = ("connect", "closed", "error", "invalid", "tls", "full")
# Why an Envoy ejects a node.
EJECT_REASONS = ("connect", "closed", "error", "invalid", "tls", "vanished")
COMMANDS = ("query", "prepare", "execute", "fetch", "ping", "change_user", "reset", "other")
ERRORS = ("access", "deadlock", "shutdown", "killed", "limit", "cluster", "syntax", "other")
DIRECTIONS = ("to_node", "to_client")
# (result, reason) of an attempt to migrate a session.
MOVED, FAILED, LOST = "moved", "failed", "lost"
MIGRATION_RESULTS = (
    (MOVED, "ok"),
    *((FAILED, why) for why in ("no_node", "unreachable", "slow", "denied", "not_restored", "invalid")),
    *((FAILED, why) for why in ("refused", "no_token", "states", "states_too_large", "states_budget")),
    (LOST, "lost"),
)
# Upper bounds in seconds of the latency buckets of commands and migrations. One more bucket has no bound.
LATENCY_BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

EMPTY_BUCKETS = (0,) * (len(LATENCY_BOUNDS_SECONDS) + 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of one node, or the sums for several nodes. A label value that was never counted is absent.

    Latency buckets are cumulative as in Prometheus; the last bucket counts everything.
    """

    sessions: Counts = field(default_factory=lambda: EMPTY_MAP)  # by SESSION_STATES
    not_movable: Counts = field(default_factory=lambda: EMPTY_MAP)  # by NOT_MOVABLE_REASONS
    logins: int = 0
    login_failures: Counts = field(default_factory=lambda: EMPTY_MAP)
    connect_failures: Counts = field(default_factory=lambda: EMPTY_MAP)
    commands: Counts = field(default_factory=lambda: EMPTY_MAP)
    latency_buckets: tuple[int, ...] = EMPTY_BUCKETS
    latency_sum_seconds: float = 0.0  # total over all commands
    recent_latency_buckets: tuple[int, ...] = EMPTY_BUCKETS  # only commands of the last one to two minutes
    errors: Counts = field(default_factory=lambda: EMPTY_MAP)
    bytes: Counts = field(default_factory=lambda: EMPTY_MAP)
    # Attempts to migrate sessions away from this node. Buckets and sum contain only successful attempts.
    migrations: MigrationCounts = field(default_factory=lambda: MappingProxyType({}))
    migration_buckets: tuple[int, ...] = EMPTY_BUCKETS
    migration_sum_seconds: float = 0.0


_NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Number of sessions on each node, as the module in one Envoy counts them.

    `sessions` omits zeros. An omitted count proves that the node has no session only if the node is in
    `complete_nodes`. No count is older than `oldest_count_at`.
    """

    at: float  # time of the latest report
    oldest_count_at: float
    sessions: Counts = field(default_factory=lambda: EMPTY_MAP)
    complete_nodes: Set[str] = frozenset()
    has_counted_sessions: bool = True  # False: no session has been counted since the Envoy started
    instance: str = ""  # id of the Envoy process, new at each start; empty: its module does not report one


@dataclass(frozen=True, slots=True)
class ConfigRejection:
    at: float
    extension: str
    text: str


@dataclass(frozen=True, slots=True)
class Ejection:
    """An Envoy sends no new sessions to a node after a failure of the node."""

    envoy: str
    reason: str  # one of EJECT_REASONS
    since: float


@dataclass(frozen=True, slots=True)
class LogCounts:
    """What a log of an Envoy has written and lost since the Envoy started."""

    written: int = 0  # lines of the login log, statements in the statement log
    dropped: int = 0
    write_errors: int = 0


V = TypeVar("V")


class LazyTrafficByNode(Mapping[str, Traffic], Generic[V]):
    """Traffic by node. Entries are built on each access, because only a few of thousands are ever read."""

    def __init__(self, entries: Mapping[str, V], build: Callable[[str, V], Traffic]) -> None:
        self._entries, self._build = entries, build

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
        return LazyTrafficByNode(_filtered(self._entries, nodes), self._build)


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """All counters of the module in one Envoy, as of one flush (Envoy exports its stats periodically).

    The keys of `nodes` are addresses, and "" for counters without a node. `rejections` counts rejected
    configurations by (extension, text). `dropped_series` counts unreadable series, and series with an unknown
    node or label value, since the stream began. `session_counts` is None until all series have arrived.
    `is_first` marks the first flush of a stream: its counts may be of any age.
    """

    envoy: str
    at: float
    version: str = ""
    instance: str = ""  # id of the Envoy process, new at each start; empty: unknown
    nodes: Mapping[str, Traffic] = field(default_factory=lambda: EMPTY_MAP)
    migrations: Mapping[str, MigrationCounts] = field(default_factory=lambda: EMPTY_MAP)  # by node
    rejections: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    ejections: Mapping[str, Ejection] = field(default_factory=lambda: EMPTY_MAP)  # by node
    is_ending: bool = False  # the Envoy drains: it refuses new clients
    has_ended: bool = False  # its ports are closed for good, and its last client has left
    runtime_off: frozenset[str] = frozenset()  # the SWITCHES that Envoy's own runtime has switched off
    limits: Mapping[str, LimitUsage] = field(default_factory=lambda: EMPTY_MAP)  # by name of the rule
    rule_hits: Mapping[str, RuleHits] = field(default_factory=lambda: EMPTY_MAP)  # by name of the rule
    dropped_series: int = 0
    # By name of the log. A log that has been off since the Envoy started is missing.
    logs: Mapping[str, LogCounts] = field(default_factory=lambda: EMPTY_MAP)
    capture: CaptureCounts | None = None  # None: no capture since the Envoy started
    session_counts: SessionCounts | None = None
    is_first: bool = False

    def filtered(self, nodes: Set[str]) -> ModuleReport:
        """Return the report limited to the given nodes."""
        if self.nodes.keys() | self.ejections.keys() <= nodes:
            return self
        traffic = self.nodes
        return replace(
            self,
            nodes=traffic.filtered(nodes)
            if isinstance(traffic, LazyTrafficByNode)
            else _filtered(traffic, nodes),
            migrations=_filtered(self.migrations, nodes),
            ejections=_filtered(self.ejections, nodes),
        )


def _filtered(by_node: Mapping[str, V], nodes: Set[str]) -> Mapping[str, V]:
    return {node: value for node, value in by_node.items() if node in nodes}


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    all_parts = list(parts)
    if len(all_parts) == 1:
        return all_parts[0]
    sums: dict[str, Any] = {}
    for part_field in fields(Traffic):
        name = part_field.name
        values = [getattr(part, name) for part in (_NO_TRAFFIC, *all_parts)]
        if isinstance(values[0], Mapping):
            sums[name] = _sum_counts(values)
        elif isinstance(values[0], tuple):
            sums[name] = tuple(map(sum, zip(*values, strict=True)))
        else:
            sums[name] = sum(values)
    return Traffic(**sums)


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


def _sum_counts(mappings: Iterable[Mapping[Any, int]]) -> Mapping[Any, int]:
    sums: dict[Any, int] = {}
    for counts in mappings:
        for key, count in counts.items():
            sums[key] = sums.get(key, 0) + count
    return MappingProxyType(sums)

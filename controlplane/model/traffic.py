"""What Tidevoy's module in an Envoy tells of the traffic: counts by node, and their sums. Pure data.

Counters count since that Envoy started; sessions are those of now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Counts = Mapping[str, int]
Moves = Mapping[tuple[str, str], int]  # by MOVES

# The words that the module counts by. Others are not taken over, so that nothing an Envoy sends can grow.
STATES = ("login", "idle", "busy", "transaction", "opaque")
PIN_REASONS = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")
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
MOVED, STAYED, LOST = "moved", "stayed", "lost"
MOVES = (
    (MOVED, "ok"),
    *((STAYED, why) for why in ("no_node", "unreachable", "slow", "denied", "not_restored", "invalid")),
    *((STAYED, why) for why in ("refused", "no_token", "states", "states_too_large", "states_budget")),
    (LOST, "lost"),
)
# Upper bounds of the buckets of a command's latency, and of a move's, in seconds; the last bucket has none.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

_NONE: Mapping[str, Any] = MappingProxyType({})
NO_BUCKETS = (0,) * (len(BOUNDS) + 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one node, or of several. A word that is not there was never counted.

    `buckets` are cumulative, as Prometheus has them: commands that took at most that bound, the last all.
    """

    sessions: Counts = field(default_factory=lambda: _NONE)  # by STATES
    pinned: Counts = field(default_factory=lambda: _NONE)  # sessions that cannot be moved, by PIN_REASONS
    logins: int = 0
    login_failures: Counts = field(default_factory=lambda: _NONE)
    connect_failures: Counts = field(default_factory=lambda: _NONE)
    commands: Counts = field(default_factory=lambda: _NONE)
    buckets: tuple[int, ...] = NO_BUCKETS
    seconds: float = 0.0  # that all commands together took
    recent: tuple[int, ...] = NO_BUCKETS  # as `buckets`, of the last minute or two only
    errors: Counts = field(default_factory=lambda: _NONE)
    bytes: Counts = field(default_factory=lambda: _NONE)
    moves: Moves = field(default_factory=lambda: MappingProxyType({}))  # of sessions that were on this node
    move_buckets: tuple[int, ...] = NO_BUCKETS  # as `buckets`, of those that moved
    move_seconds: float = 0.0  # that these together took


@dataclass(frozen=True, slots=True)
class Census:
    """How many sessions the module in one Envoy has on each node: all of them, at the node where they are.

    There is none before a stream has told all that there is. `sessions` holds the latest numbers, without
    those that are zero. What is not in it is known to be zero, as of `began` or later, for the nodes in
    `covered` alone.
    """

    at: float  # of the latest word
    began: float
    sessions: Counts = field(default_factory=lambda: _NONE)
    covered: Set[str] = frozenset()
    has_served: bool = True  # False: it has counted no session since its Envoy started
    instance: str = ""  # of the Envoy's process, new with each; empty: its module does not say


@dataclass(frozen=True, slots=True)
class Refusal:
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


class Parts(Mapping[str, Traffic], Generic[V]):
    """Traffic by node, made of what is known whenever somebody looks: of thousands hardly anybody does."""

    def __init__(
        self, known: Mapping[str, V], make: Callable[[str, V], Traffic], moves: Mapping[str, Moves]
    ) -> None:
        """`moves` are those of the nodes that have some."""
        self._known, self._make, self.moves = known, make, moves

    def __getitem__(self, node: str) -> Traffic:
        return self._make(node, self._known[node])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, node: object) -> bool:
        return node in self._known

    def only(self, nodes: Set[str]) -> Parts[V]:
        """Those of some nodes."""
        kept = {node: each for node, each in self._known.items() if node in nodes}
        return Parts(kept, self._make, {node: each for node, each in self.moves.items() if node in nodes})


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
    nodes: Mapping[str, Traffic] = field(default_factory=lambda: _NONE)
    refusals: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    ejections: Mapping[str, Ejection] = field(default_factory=lambda: MappingProxyType({}))  # by node
    dropped: int = 0
    census: Census | None = None
    is_first: bool = False

    def moves(self) -> Mapping[str, Moves]:
        """The moves of nodes that have some."""
        if isinstance(self.nodes, Parts):
            return self.nodes.moves
        return {node: part.moves for node, part in self.nodes.items() if part.moves}

    def only(self, nodes: Set[str]) -> ModuleReport:
        """It without what it has of other nodes."""
        if self.nodes.keys() | self.ejections.keys() <= nodes:
            return self
        ejections = {node: each for node, each in self.ejections.items() if node in nodes}
        report = replace(self, ejections=MappingProxyType(ejections))
        if isinstance(self.nodes, Parts):
            return replace(report, nodes=self.nodes.only(nodes))
        kept = {node: part for node, part in self.nodes.items() if node in nodes}
        return replace(report, nodes=MappingProxyType(kept))


K = TypeVar("K", str, tuple[str, str])


def total(parts: Iterable[Traffic]) -> Traffic:
    """The sum of all parts."""
    each = list(parts)
    if len(each) == 1:
        return each[0]
    return Traffic(
        sessions=_sum(part.sessions for part in each),
        pinned=_sum(part.pinned for part in each),
        logins=sum(part.logins for part in each),
        login_failures=_sum(part.login_failures for part in each),
        connect_failures=_sum(part.connect_failures for part in each),
        commands=_sum(part.commands for part in each),
        buckets=_add(part.buckets for part in each),
        seconds=sum(part.seconds for part in each),
        recent=_add(part.recent for part in each),
        errors=_sum(part.errors for part in each),
        bytes=_sum(part.bytes for part in each),
        moves=_sum(part.moves for part in each),
        move_buckets=_add(part.move_buckets for part in each),
        move_seconds=sum(part.move_seconds for part in each),
    )


def quantile(share: float, buckets: tuple[int, ...]) -> float | None:
    """Seconds within which that share of the commands was answered; None when there was none.

    Between two bounds it is a guess on a straight line, and never more than the last bound, as Prometheus's
    `histogram_quantile` does it.
    """
    if not buckets[-1]:
        return None
    rank = share * buckets[-1]
    below, lower = 0, 0.0
    for count, upper in zip(buckets, BOUNDS, strict=False):
        if count >= rank:
            return lower + (upper - lower) * (rank - below) / (count - below) if count > below else upper
        below, lower = count, upper
    return BOUNDS[-1]


def moves_by_reason(moves: Moves, result: str) -> Counts:
    """The moves that had that result, by why."""
    return {reason: count for (had, reason), count in moves.items() if had == result}


def _sum(each: Iterable[Mapping[K, int]]) -> Mapping[K, int]:
    sums: dict[K, int] = {}
    for counts in each:
        for word, count in counts.items():
            sums[word] = sums.get(word, 0) + count
    return MappingProxyType(sums)


def _add(each: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(NO_BUCKETS, *each, strict=True)))

"""The words of Tidevoy as frozen data: nodes, facts, intents, plans, events. No I/O, no clock.

Times are Unix seconds as floats, taken from one steady clock per process (`controlplane.clock`), so that
differences are meaningful even when the system clock is set. `None` means "never" or "not known".

An address is the text `host:port`, IPv6 hosts in brackets (`[fd00::1]:4000`), exactly as it stands in the
topology key; it is the identity of a node. An endpoint is the same shape but always a literal IP.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from controlplane.traffic import Census, Ejection, ModuleReport, Moves, Refusal, Traffic
from controlplane.vitals import Vitals

NOTHING: Mapping[str, Any] = MappingProxyType({})

Place = tuple[str, str]  # the address and the endpoint of a node: who counts its sessions goes by one of them
Quarter = tuple[str, str]  # a group and a zone


class Source(StrEnum):
    """Who told us of a node; where two tell of the same address, the earlier one here wins."""

    PD = "pd"
    STATIC = "static"
    API = "api"


class State(StrEnum):
    """Where a node is in its life (the table is in docs/concepts.md)."""

    JOINING = "joining"
    ACTIVE = "active"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    DRAINED = "drained"
    GONE = "gone"


class Advice(StrEnum):
    """What Envoys are told of a node by EDS; a node that they are not told of has none."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"


class Outcome(StrEnum):
    """What one probe found."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    STOPPING = "stopping"  # the node answers, and says that it is starting up or shutting down


class Strategy(StrEnum):
    """What sessions are shared out by, beside the nodes' weights; names and meaning are TiProxy's."""

    RESOURCE = "resource"  # health, memory, CPU, then place, then connections
    LOCATION = "location"  # place, then health, memory, CPU, then connections
    CONNECTION = "connection"  # connections alone


class OnDeadline(StrEnum):
    """What happens to sessions that are left when a drain's deadline comes."""

    KEEP = "keep"
    CLOSE = "close"


# --- facts: what was observed -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """One TiDB server as a source describes it."""

    address: str
    source: Source
    status_address: str | None = None
    version: str = ""
    git_hash: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    started_at: float | None = None
    weight: int = 100
    registered: bool = True  # False: `info` is there but its `ttl` is not, so nobody vouches for it


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a source that could not be used, told so that a person can mend it."""

    source: Source
    subject: str  # the etcd key or the configuration key
    reason: str


@dataclass(frozen=True, slots=True)
class Topology:
    """All that one source says, whole: a later one replaces an earlier one of the same source."""

    source: Source
    nodes: Mapping[str, Node] = field(default_factory=lambda: NOTHING)
    foreign: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # address -> its other keyspace
    problems: tuple[Problem, ...] = ()
    complete: bool = False  # a whole list has been read at least once since start
    outage: str = ""  # why this is not up to date, as a sentence; empty when it is


@dataclass(frozen=True, slots=True)
class Probe:
    """The latest outcome of one kind of check on one node."""

    outcome: Outcome
    reason: str  # a sentence
    streak: int  # how many times in a row the outcome was this one, at least 1
    at: float


@dataclass(frozen=True, slots=True)
class Health:
    """What the checks know of a node. A check that is switched off or has not run yet is None."""

    status: Probe | None = None
    sql: Probe | None = None
    connections: int | None = None  # TiDB's own count of client connections, from `GET /status`
    connections_at: float | None = None
    version: str = ""  # MySQL-style version from `GET /status`
    hindrances: tuple[str, ...] = ()  # what its configuration lacks for sessions to move, a sentence each


@dataclass(frozen=True, slots=True)
class Resolution:
    """The last answer of DNS for one host name. `ip` is kept when a later look-up fails."""

    host: str
    ip: str | None
    reason: str = ""  # why there is no (new) answer; empty when the last look-up succeeded


@dataclass(frozen=True, slots=True)
class EnvoyLoad:
    """One load report of one Envoy: live connections and connections opened since the report before it.

    Keys are endpoints (`ip:port`). An endpoint that is not named has no connection.
    """

    envoy: str
    at: float
    live: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    opened: Mapping[str, int] = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was observed, as of one moment."""

    topologies: Mapping[Source, Topology] = field(default_factory=lambda: MappingProxyType({}))
    health: Mapping[str, Health] = field(default_factory=lambda: NOTHING)  # by address
    resolutions: Mapping[str, Resolution] = field(default_factory=lambda: NOTHING)  # by host name
    loads: Mapping[str, EnvoyLoad] = field(default_factory=lambda: NOTHING)  # by Envoy id
    # Sessions by endpoint, over the `loads` of Envoys that are not counted by their module.
    live: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    censuses: Mapping[str, Census] = field(default_factory=lambda: NOTHING)  # by Envoy id
    # Sessions by address, over the `censuses` of Envoys that are counted by their module.
    counted: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    modules: Set[str] = frozenset()  # ids of Envoys that say they have the module
    # Tries to move sessions away, by address, since this control plane began to hear of the node.
    moves: Mapping[str, Moves] = field(default_factory=lambda: NOTHING)
    arrivals: float = 0.0  # new connections per second over the whole fleet, from the latest reports
    opened: Mapping[str, int] = field(default_factory=lambda: NOTHING)  # where these were, by endpoint
    envoys: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # Envoy id -> last seen
    reports: Mapping[str, ModuleReport] = field(default_factory=lambda: NOTHING)  # by Envoy id
    refusals: Mapping[str, Refusal] = field(default_factory=lambda: NOTHING)  # the last one, by Envoy id
    doubted: Set[str] = frozenset()  # ids of Envoys that may be opening sessions otherwise than we published
    unheard: Set[str] = frozenset()  # control planes that are there, and whose Envoys nobody tells us of
    # By Envoy, and then by address of a node that is closed to new sessions: since when that Envoy is known
    # to route by endpoints that say so. Of an Envoy that was away meanwhile it is known anew.
    heeded: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: NOTHING)
    began: float = 0.0  # when observing began
    vitals: Mapping[str, Vitals] = field(default_factory=lambda: NOTHING)  # by address
    vitals_outage: str = ""  # why there are no (new) vitals of any node, as a sentence; empty: all is well
    zones: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # Envoy id -> where it says it is


# --- intents: what operators asked for ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drain:
    """A node that an operator wants empty."""

    since: float
    deadline_seconds: float
    on_deadline: OnDeadline = OnDeadline.KEEP
    by: str = ""  # the id of the rollout that asked for it; empty: an operator did


@dataclass(frozen=True, slots=True)
class AddedNode:
    """A node that an operator added by hand."""

    address: str
    status_address: str | None = None
    weight: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True)
class Intents:
    """All that operators asked for and have not taken back."""

    added: Mapping[str, AddedNode] = field(default_factory=lambda: NOTHING)
    removed: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # address -> since when
    drains: Mapping[str, Drain] = field(default_factory=lambda: NOTHING)
    weights: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: NOTHING)
    ended: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # id of an Envoy -> since when


# --- plan: what was decided --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that clients of one port, or of some Envoys, are led to: those that have all these labels.

    A node is in the first group that it fits. Those that fit none are in the group that has no name.
    """

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on, without the rest of the configuration. Times in seconds."""

    status_check: bool = True
    sql_check: bool = True
    status_rise: int = 2
    status_fall: int = 3
    sql_rise: int = 2
    sql_fall: int = 3
    registration_grace: float = 60.0
    gone_grace: float = 600.0
    floor: float = 0.25
    slow_start: float = 10.0
    default_weight: int = 100
    envoy_memory: float = 600.0
    # How long a session that moves may be on its way to a node that has just been closed: the module gives up
    # moves to nodes that are left themselves.
    move_limit: float = 1.0
    report_interval: float = 1.0
    connect_timeout: float = 1.0
    fleet_return: float = 15.0
    rebalance: bool = True
    rebalance_per_second: float = 200.0  # sessions, over the whole fleet
    rebalance_threshold: float = 0.05  # of a node's share: what it may have more without giving any away
    status_interval: float = 1.0
    strategy: Strategy = Strategy.RESOURCE
    groups: tuple[Group, ...] = ()
    backup: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # labels of nodes that stand in
    zone_label: str = "zone"  # the label of a node that says where it is
    spill: float = 1.5  # a zone is full when its nodes have so many times the load of all nodes


@dataclass(frozen=True, slots=True)
class Factor:
    """How one of a node's vital signs bears on its share of the sessions."""

    share: float  # of what it would have without it, now: above 0, at most 1
    target: float  # where that is going
    level: int = 0  # 0: normal; higher is worse
    reason: str = ""  # as a sentence; empty: nothing is wrong with it


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What was decided for one node, and why."""

    node: Node
    state: State
    reason: str
    since: float  # when it came into this state
    advice: Advice | None = None
    weight: int = 0  # what EDS carries; at least 1 when the advice is HEALTHY, else 0
    endpoint: str | None = None
    active_since: float | None = None  # start of the present stretch of service; slow start counts from here
    unregistered_since: float | None = None  # `ttl` is missing since then
    closed_since: float | None = None  # new sessions are kept off it since then
    leaving_since: float | None = None  # `info` is missing, or an operator removed it, since then
    version: str = ""  # release of its TiDB, such as `v8.5.3`; empty: not known
    closing: bool = False  # the sessions that are left on it are to be ended
    # By name (`health`, `memory`, `cpu`), those alone that take something of its share, or have lately.
    factors: Mapping[str, Factor] = field(default_factory=lambda: NOTHING)
    group: str = ""
    backup: bool = False  # it serves only when no other node of its group does
    zone: str = ""  # where it is; empty: not known
    local_weight: int = 0  # as `weight`, among the nodes of its group and zone; 0: all may use all


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Sessions that are asked to move to nodes that want some, in rounds."""

    since: float | None = None  # None: none is under way
    reason: str = ""  # for whose sake, as a sentence, or why it is over
    round: int = 0  # the number of the latest round; later ones have higher ones
    until: float = 0.0  # reports of before then do not know yet what came of the latest round
    # How many sessions are to leave: by address of their node, then by instance of their Envoy.
    moves: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: NOTHING)
    # How many of these sessions each node is to get, in the same form; no other node gets any.
    wants: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: NOTHING)
    futile: int = 0  # rounds in a row after which nothing was better than before
    excess: int = (
        -1
    )  # sessions too many anywhere when the latest round began; -1: its outcome has been judged
    moved: int = 0  # sessions that had moved by then, since we hear of their nodes
    rests_until: float = 0.0  # no round begins before, unless nodes come or go


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided for all nodes. Equal plans need no publishing."""

    nodes: Mapping[str, NodePlan] = field(default_factory=lambda: NOTHING)
    floor: str = ""  # why nodes are kept in service against their checks; empty when none are
    rebalance: Rebalance = field(default_factory=Rebalance)
    weighed_at: float = field(default=0.0, compare=False)  # when the weights were worked out last
    full: frozenset[Quarter] = frozenset()  # groups and zones whose Envoys use nodes elsewhere, too


# --- what people see ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nack:
    """An Envoy's refusal of what it was sent."""

    at: float
    type_url: str
    version: str
    message: str


@dataclass(frozen=True, slots=True)
class EnvoyStatus:
    """One Envoy as its stream shows it."""

    id: str
    address: str
    version: str
    filter: str
    connected_since: float | None  # None: not connected now
    last_seen: float
    acked_version: str = ""
    published_version: str = ""
    endpoints_acked: bool = True  # it routes by the endpoints that were published last, or by none at all
    group: str = ""  # the only one that it is there for; empty: all
    zone: str = ""  # where it is, as it says itself; empty: not known
    module_version: str = ""  # of Tidevoy's module, as it says itself; empty: it has none
    problem: str = ""  # why it serves nobody, or without what it should have; empty: all is well
    streams: int = 1  # open ones; more than one means that Envoys share an id
    outdated: tuple[str, ...] = ()  # what it runs in an older form until it is started again
    last_nack: Nack | None = None
    nacks: int = 0
    certificate_until: float | None = None  # when the one ends that it has shown; None: it showed none


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for people and for `GET /v1/events`.

    `kind` is dotted (`node.state`, `envoy.nack`); `subject` is the node's address, the Envoy's id or a key.
    """

    id: int
    at: float
    kind: str
    subject: str
    message: str
    data: Mapping[str, Any] = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True)
class Departure:
    """What has come of the sessions of a node since it is being left. Moves are those that Envoys told of."""

    since: float
    seconds: float  # how long it took, or has taken so far
    left: int | None  # sessions that are still there; None: not known
    moved: int = 0
    failed: Mapping[str, int] = field(default_factory=lambda: NOTHING)  # tries after which one stayed, by why
    lost: int = 0  # sessions that ended because of a try
    pinned: Mapping[str, int] = field(default_factory=lambda: NOTHING)  # that cannot move now, by why
    seconds_left: float | None = None  # at the pace so far; None: that cannot be told
    had_sessions: bool = True


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `GET /v1/nodes` shows it: the plan for it, and the facts behind it."""

    plan: NodePlan
    health: Health
    weight: int  # configured capacity; what EDS carries is `plan.weight`
    connections: int | None  # TiDB's own count; None: not known
    sessions: int | None  # live connections of all Envoys to it; None: no Envoy has reported yet
    drain: Drain | None = None
    traffic: Traffic | None = None  # through all Envoys; None: none of them has told of a module
    departure: Departure | None = None  # None: it is not being left
    rebalance: int = 0  # sessions that are asked to move to other nodes in this round
    vitals: Vitals | None = None  # None: nothing is known of its load and health
    ejections: tuple[Ejection, ...] = ()  # by which Envoys


@dataclass(frozen=True, slots=True)
class EnvoyView:
    """One Envoy as `GET /v1/envoys` shows it."""

    status: EnvoyStatus
    sessions: int | None  # live connections to all nodes; None: it has not reported yet
    traffic: Traffic | None = None  # None: it has told of no module
    refusal: Refusal | None = None  # the last configuration that its module would not take


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload changed: setting paths by when they take effect."""

    now: tuple[str, ...] = ()
    new_envoys: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

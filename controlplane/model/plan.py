"""What is decided for each node, and the settings that decisions depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.nodes import EMPTY_MAP, GroupZone, Node, NodeGroup, State

Stamp = tuple[int, int]
"""Identifies a plan: the term of the leader that decided it, and the plan's number within that term."""


class EdsHealth(StrEnum):
    """What Envoys are told of a node by EDS; a node that they are not told of has none."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"


class BalancePolicy(StrEnum):
    """What sessions are shared out by, beside the nodes' weights; names and meaning are TiProxy's."""

    RESOURCE = "resource"  # health, memory, CPU, then place, then connections
    LOCATION = "location"  # place, then health, memory, CPU, then connections
    CONNECTION = "connection"  # connections alone


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
    panic_threshold: float = 0.25
    slow_start: float = 10.0
    default_weight: int = 100
    envoy_retention: float = 600.0
    # How long a session that moves may be on its way to a node that has just been closed: the module gives up
    # moves to nodes that are left themselves.
    migration_timeout: float = 1.0
    report_interval: float = 1.0
    connect_timeout: float = 1.0
    reconnect_grace: float = 15.0
    rebalance_enabled: bool = True
    rebalance_per_second: float = 200.0  # sessions, over the whole fleet
    rebalance_threshold: float = 0.05  # of a node's share: what it may have more without giving any away
    status_interval: float = 1.0
    balance_policy: BalancePolicy = BalancePolicy.RESOURCE
    groups: tuple[NodeGroup, ...] = ()
    backup_labels: Mapping[str, str] = field(
        default_factory=lambda: EMPTY_MAP
    )  # labels of nodes that stand in
    zone_label: str = "zone"  # the label of a node that says where it is
    zone_overload_ratio: float = 1.5  # a zone is full when its nodes have so many times the load of all nodes


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
    eds_health: EdsHealth | None = None
    weight: int = 0  # what EDS carries; at least 1 when the advice is HEALTHY, else 0
    endpoint: str | None = None
    active_since: float | None = None  # start of the present stretch of service; slow start counts from here
    unregistered_since: float | None = None  # `ttl` is missing since then
    closed_since: float | None = None  # new sessions are kept off it since then
    removal_since: float | None = None  # `info` is missing, or an operator removed it, since then
    version: str = ""  # release of its TiDB, such as `v8.5.3`; empty: not known
    terminate_sessions: bool = False  # the sessions that are left on it are to be ended
    # By name (`health`, `memory`, `cpu`), those alone that take something of its share, or have lately.
    factors: Mapping[str, Factor] = field(default_factory=lambda: EMPTY_MAP)
    group: str = ""
    backup: bool = False  # it serves only when no other node of its group does
    zone: str = ""  # where it is; empty: not known
    local_weight: int = 0  # as `weight`, among the nodes of its group and zone; 0: all may use all


@dataclass(frozen=True, slots=True)
class RebalanceState:
    """Sessions that are asked to move to nodes that want some, in rounds."""

    since: float | None = None  # None: none is under way
    reason: str = ""  # for whose sake, as a sentence, or why it is over
    round: int = 0  # the number of the latest round; later ones have higher ones
    round_ends_at: float = 0.0  # reports of before then do not know yet what came of the latest round
    # How many sessions are to leave: by address of their node, then by instance of their Envoy.
    outgoing: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    # How many of these sessions each node is to get, in the same form; no other node gets any.
    incoming: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    stalled_rounds: int = 0  # rounds in a row after which nothing was better than before
    surplus: int = (
        -1
    )  # sessions too many anywhere when the latest round began; -1: its outcome has been judged
    migrated_before: int = 0  # sessions that had moved by then, since we hear of their nodes
    paused_until: float = 0.0  # no round begins before, unless nodes come or go


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided for all nodes. Equal plans need no publishing."""

    nodes: Mapping[str, NodePlan] = field(default_factory=lambda: EMPTY_MAP)
    panic_threshold_reason: str = (
        ""  # why nodes are kept in service against their checks; empty when none are
    )
    rebalance: RebalanceState = field(default_factory=RebalanceState)
    weights_computed_at: float = field(default=0.0, compare=False)  # when the weights were worked out last
    overloaded_zones: frozenset[GroupZone] = (
        frozenset()
    )  # groups and zones whose Envoys use nodes elsewhere, too

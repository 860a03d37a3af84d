"""The plan (the decision for each node), and the settings that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.nodes import EMPTY_MAP, GroupZone, Node, NodeGroup, State

Stamp = tuple[int, int]
"""Identifies a plan: the term of the leader that decided it, and the plan's number within that term."""


class EdsHealth(StrEnum):
    """Health status of a node in EDS; a node that EDS does not contain has none."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"


class BalancePolicy(StrEnum):
    """What balancing takes into account beside node weights; names and meaning are TiProxy's."""

    RESOURCE = "resource"  # health, memory, CPU, then location, then connections
    LOCATION = "location"  # location, then health, memory, CPU, then connections
    CONNECTION = "connection"  # connections only


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that the plan depends on. Times are in seconds."""

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
    # How long a migrating session may still be on its way to a node that was just closed: the module gives up
    # migrations to nodes that are being drained.
    migration_timeout: float = 1.0
    report_interval: float = 1.0
    connect_timeout: float = 1.0
    reconnect_grace: float = 15.0
    rebalance_enabled: bool = True
    rebalance_per_second: float = 200.0  # sessions, over the whole fleet
    rebalance_threshold: float = 0.05  # part of its share by which a node may exceed it without rebalancing
    status_interval: float = 1.0
    balance_policy: BalancePolicy = BalancePolicy.RESOURCE
    groups: tuple[NodeGroup, ...] = ()
    backup_labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # labels of backup nodes
    zone_label: str = "zone"  # the node label that holds its zone
    zone_overload_ratio: float = 1.5  # a zone is overloaded at this multiple of the load of its group


@dataclass(frozen=True, slots=True)
class Factor:
    """How one metric of a node reduces its share of the sessions."""

    share: float  # current multiplier of its share: above 0, at most 1
    target: float  # the value that `share` approaches
    level: int = 0  # 0: normal; higher is worse
    reason: str = ""  # as a sentence; empty: the metric is normal


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The decision for one node, and the reason."""

    node: Node
    state: State
    reason: str
    since: float  # when it entered this state
    eds_health: EdsHealth | None = None
    weight: int = 0  # weight in EDS: at least 1 if `eds_health` is HEALTHY, else 0
    endpoint: str | None = None
    active_since: float | None = None  # start of the current time in service; slow start counts from here
    unregistered_since: float | None = None  # when its `ttl` went missing
    closed_since: float | None = None  # when it was closed to new sessions
    removal_since: float | None = None  # when its `info` went missing or an operator removed it
    version: str = ""  # TiDB release, such as `v8.5.3`; empty: not known
    terminate_sessions: bool = False  # Envoys terminate the sessions that remain on it
    # By name (`health`, `memory`, `cpu`): only factors that reduce its share, or did so recently.
    factors: Mapping[str, Factor] = field(default_factory=lambda: EMPTY_MAP)
    group: str = ""
    backup: bool = False  # it serves only if no other node of its group does
    zone: str = ""  # empty: not known
    local_weight: int = 0  # like `weight`, within its group and zone; 0: no Envoy is limited to its zone


@dataclass(frozen=True, slots=True)
class RebalanceState:
    """Rebalancing state: the sessions that the current round asks Envoys to migrate."""

    since: float | None = None  # None: no rebalancing is in progress
    reason: str = ""  # why it runs or why it ended, as a sentence
    round: int = 0  # number of the latest round; it only grows
    round_ends_at: float = 0.0  # earlier reports do not show the result of the latest round
    # How many sessions are to migrate: by address of their node, then by instance of their Envoy.
    outgoing: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    # How many of these sessions each node receives, in the same form; no other node receives any.
    incoming: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    stalled_rounds: int = 0  # consecutive rounds that improved nothing
    # Sessions above the share of their node when the latest round began; -1: its result is already evaluated.
    surplus: int = -1
    migrated_before: int = 0  # sessions that had migrated by then, as counted in `Facts.migrations`
    paused_until: float = 0.0  # no round starts before this time unless the set of nodes changes


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for all nodes. A plan that equals the published one need not be published."""

    nodes: Mapping[str, NodePlan] = field(default_factory=lambda: EMPTY_MAP)
    panic_threshold_reason: str = ""  # why failing nodes are kept in service; empty: none is
    rebalance: RebalanceState = field(default_factory=RebalanceState)
    weights_computed_at: float = field(default=0.0, compare=False)  # when the weights were last computed
    overloaded_zones: frozenset[GroupZone] = frozenset()  # their Envoys also use nodes of other zones

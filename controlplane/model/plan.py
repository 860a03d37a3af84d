"""The plan (the decision for each node), and the settings that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.capture import Capture
from controlplane.model.limits import LimitPlan, LimitRule
from controlplane.model.module_switches import ALL_ON, ModuleSwitches, SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP, GroupZone, Node, NodeGroup, State
from controlplane.model.rules import StatementRule

Stamp = tuple[int, int]
"""Identifies a plan: the term of the leader that computed it, and the number of the plan in that term."""


class EdsHealth(StrEnum):
    """Health status of a node in EDS. A node without an EDS entry has no status."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"


class BalancePolicy(StrEnum):
    """Criteria for balancing besides node weights, by priority. Names and meaning are those of TiProxy."""

    RESOURCE = "resource"  # health, memory, CPU, then location, then connections
    LOCATION = "location"  # location, then health, memory, CPU, then connections
    CONNECTION = "connection"  # connections only


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that the plan depends on. Times are in seconds."""

    status_check: bool = True
    sql_check: bool = True
    statement_check: bool = False
    status_rise: int = 2
    status_fall: int = 3
    sql_rise: int = 2
    sql_fall: int = 3
    statement_rise: int = 2
    statement_fall: int = 3
    registration_grace: float = 60.0
    gone_grace: float = 600.0
    panic_threshold: float = 0.25
    slow_start: float = 10.0
    default_weight: int = 100
    envoy_retention: float = 600.0
    migration_timeout: float = 1.0  # sessions may still arrive at a closed node by migration for this long
    report_interval: float = 1.0
    connect_timeout: float = 1.0
    reconnect_grace: float = 15.0
    rebalance_enabled: bool = True
    rebalance_per_second: float = 200.0  # sessions, over the whole fleet
    rebalance_threshold: float = 0.05  # 0.05: 5% above the share and 10% below it are tolerated
    status_interval: float = 1.0
    balance_policy: BalancePolicy = BalancePolicy.RESOURCE
    groups: tuple[NodeGroup, ...] = ()
    backup_labels: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)  # labels of backup nodes
    zone_label: str = "zone"  # the node label that holds its zone
    zone_overload_ratio: float = 1.5  # a zone is overloaded at this many times the load of its group
    module_switches: ModuleSwitches = ALL_ON
    limits: tuple[LimitRule, ...] = ()
    rules: tuple[StatementRule, ...] = ()  # those of the settings
    capture_directory: str | None = None  # None: captures are off


@dataclass(frozen=True, slots=True)
class Factor:
    """How one metric of a node reduces the node's share of the sessions."""

    share: float  # current multiplier of the node's share: above 0, at most 1
    target: float  # the value that `share` approaches
    level: int = 0  # 0: normal; higher is worse
    reason: str = ""  # why, as a sentence; empty: the metric is normal


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The decision for one node, and the reason."""

    node: Node
    state: State
    reason: str
    since: float  # when the node entered this state
    eds_health: EdsHealth | None = None
    weight: int = 0  # weight in EDS: at least 1 if `eds_health` is HEALTHY, else 0
    endpoint: str | None = None
    active_since: float | None = None  # when it last entered service; slow start begins then
    unregistered_since: float | None = None  # when its key `ttl` disappeared from PD
    closed_since: float | None = None  # when it was closed to new sessions
    removal_since: float | None = None  # when its key `info` disappeared or an operator removed it
    version: str = ""  # TiDB release, such as `v8.5.3`; empty: unknown
    terminate_sessions: bool = False  # Envoys terminate the sessions that remain on it
    # Factors that reduce its share of the sessions, or did so recently, by name (`health`, `memory`, `cpu`).
    factors: Mapping[str, Factor] = field(default_factory=lambda: EMPTY_MAP)
    group: str = ""
    backup: bool = False  # True: it serves only while no other node of its group is in service
    zone: str = ""  # empty: unknown
    local_weight: int = 0  # weight for Envoys that are limited to its zone; 0: no Envoy is


@dataclass(frozen=True, slots=True)
class RebalanceState:
    """State of rebalancing, which runs in rounds: in each round, Envoys migrate some sessions on request."""

    since: float | None = None  # None: no rebalancing is in progress
    reason: str = ""  # why it runs or why it ended, as a sentence
    round: int = 0  # number of the latest round; it never decreases
    round_ends_at: float = 0.0  # end of the latest round; only later reports show its result
    # Number of sessions to migrate, by address of their current node, then by instance of their Envoy.
    outgoing: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    # How many of these sessions each node receives, by its address, then by the instance of the Envoy.
    incoming: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: EMPTY_MAP)
    stalled_rounds: int = 0  # consecutive rounds that did not improve the balance
    # Sessions above the shares of their nodes when the latest round began; -1: its result has been evaluated.
    surplus: int = -1
    migrated_before: int = 0  # migrated sessions in `Facts.migrations` when the latest round began
    paused_until: float = 0.0  # no round starts before this time unless the set of nodes changes


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for all nodes. A plan that equals the published one need not be published again."""

    nodes: Mapping[str, NodePlan] = field(default_factory=lambda: EMPTY_MAP)
    panic_threshold_reason: str = ""  # why failing or leaving nodes stay in service; empty: they do not
    rebalance: RebalanceState = field(default_factory=RebalanceState)
    weights_computed_at: float = field(default=0.0, compare=False)  # when the weights were last computed
    overloaded_zones: frozenset[GroupZone] = frozenset()  # their Envoys also use nodes of other zones
    # Switches of the module that differ from the settings, by Envoy id.
    switch_overrides: Mapping[str, SwitchOverrides] = field(default_factory=lambda: EMPTY_MAP)
    limits: Mapping[str, LimitPlan] = field(default_factory=lambda: EMPTY_MAP)  # by name of the rule
    # Those that the API has set; they come before those of the settings.
    rules: tuple[StatementRule, ...] = ()
    capture: Capture | None = None  # the running capture of the traffic of clients

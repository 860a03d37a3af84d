"""Views of nodes, Envoys and reloads that the API, the CLI and the console show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.model.capture import Capture, CaptureCounts
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent
from controlplane.model.limits import LimitRule
from controlplane.model.module_switches import NO_OVERRIDES, SWITCHES, ModuleSwitches, SwitchOverrides
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import NodePlan
from controlplane.model.rules import RuleAction, RuleHits, RuleSource, StatementRule, describe_conditions
from controlplane.model.traffic import ConfigRejection, Ejection, Traffic


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Progress of a drain since the node was closed to new sessions."""

    since: float
    elapsed_seconds: float  # duration of the drain, or its duration so far
    sessions_left: int | None  # sessions still on the node; None: unknown
    migrated: int = 0
    # Failed migrations after which the session stayed on its node, by reason.
    failed: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    lost: int = 0  # sessions that ended because their migration failed
    # Sessions that cannot migrate now, by reason.
    not_movable: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    seconds_left: float | None = None  # estimated from the pace so far; None: unknown
    had_sessions: bool = True


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `GET /v1/nodes` shows it: its plan, and the facts behind the plan."""

    plan: NodePlan
    health: Health
    weight: int  # configured weight; the weight in EDS is `plan.weight`
    connections: int | None  # TiDB's own count of client connections; None: unknown
    sessions: int | None  # sessions of all Envoys on the node; None: no Envoy has reported yet
    drain: DrainIntent | None = None
    traffic: Traffic | None = None  # sum over all Envoys; None: no module has reported yet
    drain_progress: DrainProgress | None = None  # None: the node is not draining
    rebalancing_sessions: int = 0  # sessions that rebalancing currently migrates to other nodes
    metrics: NodeMetrics | None = None
    ejections: tuple[Ejection, ...] = ()  # one per Envoy that has ejected the node


@dataclass(frozen=True, slots=True)
class EnvoyView:
    """One Envoy as `GET /v1/envoys` shows it."""

    status: EnvoyStatus
    sessions: int | None  # on all nodes; None: the Envoy has not reported yet
    traffic: Traffic | None = None  # None: its module has not reported
    config_rejection: ConfigRejection | None = None  # the latest configuration that its module rejected
    switches: ModuleSwitches | None = None  # of its module; None: it has no module
    overrides: SwitchOverrides = NO_OVERRIDES  # the switches that an operator has set for this Envoy
    runtime_off: frozenset[str] = frozenset()  # the switches that Envoy's own runtime has switched off

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The parts of its module that are switched off."""
        if self.switches is None:
            return ()
        return tuple(part for part in SWITCHES if not getattr(self.switches, part))


@dataclass(frozen=True, slots=True)
class EnvoyLimitView:
    """What one Envoy uses of a limit."""

    envoy: str
    connections: int
    quota: int | None  # the connections that it may have now; None: connections are unlimited
    refused: int  # since the start of the Envoy


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit of client connections as `GET /v1/limits` shows it."""

    rule: LimitRule
    envoys: tuple[EnvoyLimitView, ...] = ()  # sorted by id

    @property
    def connections(self) -> int:
        """The connections of all Envoys that count."""
        return sum(envoy.connections for envoy in self.envoys)

    @property
    def refused(self) -> int:
        """The connections that all these Envoys have refused since their start."""
        return sum(envoy.refused for envoy in self.envoys)


@dataclass(frozen=True, slots=True)
class RuleView:
    """A rule for statements as `GET /v1/rules` shows it."""

    rule: StatementRule
    source: RuleSource
    envoys: Mapping[str, RuleHits] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id

    @property
    def action(self) -> RuleAction:
        return next(action for action in RuleAction if action.value in self.rule.definition)

    @property
    def is_dry_run(self) -> bool:
        return self.rule.definition.get("dry_run", False) is True

    @property
    def conditions(self) -> str:
        """The conditions as text."""
        return describe_conditions(self.rule.definition)

    @property
    def hits(self) -> int:
        """How often the rule applied at these Envoys since their start."""
        return sum(hits.hits for hits in self.envoys.values())

    @property
    def dry_run_hits(self) -> int:
        """How often it would have applied."""
        return sum(hits.dry_run_hits for hits in self.envoys.values())


class CaptureState(StrEnum):
    """Whether traffic of clients is captured."""

    NONE = "none"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EnvoyCaptureView:
    """What one Envoy has captured."""

    envoy: str
    counts: CaptureCounts | None  # None: it has not reported this capture
    problem: str = ""  # why it cannot capture; empty: it can, as far as is known


@dataclass(frozen=True, slots=True)
class CaptureView:
    """The running or last capture, as `GET /v1/traffic/capture` shows it."""

    state: CaptureState = CaptureState.NONE
    capture: Capture | None = None  # None: there was none
    ended_at: float | None = None  # None: it is running, or there was none
    directory: str = ""  # of the capture, on the machines of the Envoys; empty: captures are off
    envoys: tuple[EnvoyCaptureView, ...] = ()  # those that have to capture, and those that have reported it


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Paths of the settings that a reload changed, grouped by when the change takes effect."""

    applied: tuple[str, ...] = ()
    applied_by_module: tuple[str, ...] = ()  # Envoys without the module apply them when they start
    needs_new_envoys: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

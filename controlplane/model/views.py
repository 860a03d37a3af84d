"""Views of nodes, Envoys and reloads that the API, the CLI and the console show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import NodePlan
from controlplane.model.traffic import ConfigRejection, Ejection, Traffic


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Progress of a drain: the sessions of the node since it was closed. Envoys report the migrations."""

    since: float
    elapsed_seconds: float  # total duration, or the duration so far
    sessions_left: int | None  # sessions still on the node; None: not known
    moved: int = 0
    # Migrations that failed with the session kept on its node, by reason.
    failed: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    lost: int = 0  # sessions that a failed migration ended
    # Sessions that cannot migrate now, by reason.
    not_movable: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    seconds_left: float | None = None  # estimated from the pace so far; None: not known
    had_sessions: bool = True


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `GET /v1/nodes` shows it: its plan, and the facts behind the plan."""

    plan: NodePlan
    health: Health
    weight: int  # configured weight; EDS carries `plan.weight`
    connections: int | None  # TiDB's own count; None: not known
    sessions: int | None  # sessions of all Envoys on it; None: no Envoy has reported yet
    drain: DrainIntent | None = None
    traffic: Traffic | None = None  # sum over all Envoys; None: no Envoy has reported a module
    drain_progress: DrainProgress | None = None  # None: it is not draining
    rebalancing_sessions: int = 0  # sessions that the current round migrates to other nodes
    metrics: NodeMetrics | None = None  # None: no metrics are known
    ejections: tuple[Ejection, ...] = ()  # one per Envoy that ejects it


@dataclass(frozen=True, slots=True)
class EnvoyView:
    """One Envoy as `GET /v1/envoys` shows it."""

    status: EnvoyStatus
    sessions: int | None  # on all nodes; None: it has not reported yet
    traffic: Traffic | None = None  # None: it has reported no module
    config_rejection: ConfigRejection | None = None  # the latest configuration that its module rejected


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Changed setting paths of a configuration reload, by when they take effect."""

    applied: tuple[str, ...] = ()
    needs_new_envoys: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

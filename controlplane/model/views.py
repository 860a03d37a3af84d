"""What the API, the CLI and the console show."""

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
    """What has come of the sessions of a node since it is being left. Moves are those that Envoys told of."""

    since: float
    elapsed_seconds: float  # how long it took, or has taken so far
    sessions_left: int | None  # sessions that are still there; None: not known
    moved: int = 0
    failed: Mapping[str, int] = field(
        default_factory=lambda: EMPTY_MAP
    )  # tries after which one stayed, by why
    lost: int = 0  # sessions that ended because of a try
    not_movable: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)  # that cannot move now, by why
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
    drain: DrainIntent | None = None
    traffic: Traffic | None = None  # through all Envoys; None: none of them has told of a module
    drain_progress: DrainProgress | None = None  # None: it is not being left
    rebalancing_sessions: int = 0  # sessions that are asked to move to other nodes in this round
    metrics: NodeMetrics | None = None  # None: nothing is known of its load and health
    ejections: tuple[Ejection, ...] = ()  # by which Envoys


@dataclass(frozen=True, slots=True)
class EnvoyView:
    """One Envoy as `GET /v1/envoys` shows it."""

    status: EnvoyStatus
    sessions: int | None  # live connections to all nodes; None: it has not reported yet
    traffic: Traffic | None = None  # None: it has told of no module
    config_rejection: ConfigRejection | None = None  # the last configuration that its module would not take


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What a reload changed: setting paths by when they take effect."""

    applied: tuple[str, ...] = ()
    needs_new_envoys: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

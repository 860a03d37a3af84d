"""What the API, the CLI and the console show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health
from controlplane.model.intents import Drain
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import NOTHING
from controlplane.model.plan import NodePlan
from controlplane.model.traffic import Ejection, Refusal, Traffic


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

"""Everything that was observed, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from controlplane.model.health import Health
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import NOTHING, Resolution, Source, Topology
from controlplane.model.traffic import Census, ModuleReport, Moves, Refusal


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

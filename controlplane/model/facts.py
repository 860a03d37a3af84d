"""Everything that was observed, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from controlplane.model.health import Health
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP, Resolution, Source, Topology
from controlplane.model.traffic import ConfigRejection, MigrationCounts, ModuleReport, SessionCounts


@dataclass(frozen=True, slots=True)
class EnvoyLoad:
    """One load report of one Envoy: live connections and connections opened since the report before it.

    Keys are endpoints (`ip:port`). An endpoint that is not named has no connection.
    """

    envoy: str
    at: float
    sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    new_sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was observed, as of one moment."""

    topologies: Mapping[Source, Topology] = field(default_factory=lambda: MappingProxyType({}))
    health: Mapping[str, Health] = field(default_factory=lambda: EMPTY_MAP)  # by address
    resolutions: Mapping[str, Resolution] = field(default_factory=lambda: EMPTY_MAP)  # by host name
    loads: Mapping[str, EnvoyLoad] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # Sessions by endpoint, over the `loads` of Envoys that are not counted by their module.
    sessions_by_endpoint: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    session_counts: Mapping[str, SessionCounts] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # Sessions by address, over the `censuses` of Envoys that are counted by their module.
    sessions_by_address: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    module_envoys: Set[str] = frozenset()  # ids of Envoys that say they have the module
    # Tries to move sessions away, by address, since this control plane began to hear of the node.
    migrations: Mapping[str, MigrationCounts] = field(default_factory=lambda: EMPTY_MAP)
    new_sessions_per_second: float = (
        0.0  # new connections per second over the whole fleet, from the latest reports
    )
    new_sessions: Mapping[str, int] = field(
        default_factory=lambda: EMPTY_MAP
    )  # where these were, by endpoint
    envoys_last_seen: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # Envoy id -> last seen
    module_reports: Mapping[str, ModuleReport] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    config_rejections: Mapping[str, ConfigRejection] = field(
        default_factory=lambda: EMPTY_MAP
    )  # the last one, by Envoy id
    unsynced_envoys: Set[str] = (
        frozenset()
    )  # ids of Envoys that may be opening sessions otherwise than we published
    unreachable_replicas: Set[str] = (
        frozenset()
    )  # control planes that are there, and whose Envoys nobody tells us of
    # By Envoy, and then by address of a node that is closed to new sessions: since when that Envoy is known
    # to route by endpoints that say so. Of an Envoy that was away meanwhile it is known anew.
    closed_acks: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: EMPTY_MAP)
    observing_since: float = 0.0  # when observing began
    node_metrics: Mapping[str, NodeMetrics] = field(default_factory=lambda: EMPTY_MAP)  # by address
    node_metrics_outage: str = (
        ""  # why there are no (new) vitals of any node, as a sentence; empty: all is well
    )
    envoy_zones: Mapping[str, str] = field(
        default_factory=lambda: EMPTY_MAP
    )  # Envoy id -> where it says it is

"""All observations of the control plane as one frozen value."""

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
    """One load report of one Envoy: open connections, and connections opened since the previous report.

    Keys are endpoints (`ip:port`). An endpoint that is absent has no connection.
    """

    envoy: str
    at: float
    sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    new_sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)


@dataclass(frozen=True, slots=True)
class Facts:
    """All observations at one point in time."""

    topologies: Mapping[Source, Topology] = field(default_factory=lambda: MappingProxyType({}))
    health: Mapping[str, Health] = field(default_factory=lambda: EMPTY_MAP)  # by address
    resolutions: Mapping[str, Resolution] = field(default_factory=lambda: EMPTY_MAP)  # by host name
    loads: Mapping[str, EnvoyLoad] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # Sessions by endpoint, summed over the `loads` of Envoys whose sessions no module counts.
    sessions_by_endpoint: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    session_counts: Mapping[str, SessionCounts] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # Sessions by address, summed over the `session_counts` of Envoys whose module counts sessions.
    sessions_by_address: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    module_envoys: Set[str] = frozenset()  # ids of Envoys that report having the module
    # Attempted migrations away from a node, by address, since this control plane first observed the node.
    migrations: Mapping[str, MigrationCounts] = field(default_factory=lambda: EMPTY_MAP)
    # New connections per second over the whole fleet, from the latest reports; and their number by endpoint.
    new_sessions_per_second: float = 0.0
    new_sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    envoys_last_seen: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # Envoy id -> last seen
    module_reports: Mapping[str, ModuleReport] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # The latest rejection by Envoy id.
    config_rejections: Mapping[str, ConfigRejection] = field(default_factory=lambda: EMPTY_MAP)
    # Ids of Envoys that may route new sessions by endpoints other than those published last.
    unsynced_envoys: Set[str] = frozenset()
    # Control plane replicas that are registered but do not report their Envoys to this one.
    unreachable_replicas: Set[str] = frozenset()
    # By Envoy id, then by address of a node that is closed to new sessions: when the Envoy acknowledged
    # endpoints that say so. The time starts over after the Envoy was disconnected.
    closed_acks: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: EMPTY_MAP)
    observing_since: float = 0.0  # when observation began
    node_metrics: Mapping[str, NodeMetrics] = field(default_factory=lambda: EMPTY_MAP)  # by address
    # Why no node has (new) metrics, as a sentence; empty: metrics are available.
    node_metrics_outage: str = ""
    # Zone that each Envoy reports for itself, by Envoy id.
    envoy_zones: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)

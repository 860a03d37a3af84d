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

    Keys are endpoints (`ip:port`). An endpoint without connections is absent.
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
    # By endpoint: the sum of the `loads` of the Envoys without a module or whose module counted no session.
    sessions_by_endpoint: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    session_counts: Mapping[str, SessionCounts] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # By node address: the sum of the `session_counts` of the Envoys whose module has counted a session.
    sessions_by_address: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    module_envoys: Set[str] = frozenset()  # ids of Envoys that report having the module
    # Attempts to migrate sessions away from each node, by address, since this replica discovered the node.
    migrations: Mapping[str, MigrationCounts] = field(default_factory=lambda: EMPTY_MAP)
    # New connections in the latest load reports: per second in the whole fleet, and their number by endpoint.
    new_sessions_per_second: float = 0.0
    new_sessions: Mapping[str, int] = field(default_factory=lambda: EMPTY_MAP)
    envoys_last_seen: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # Envoy id -> last seen
    module_reports: Mapping[str, ModuleReport] = field(default_factory=lambda: EMPTY_MAP)  # by Envoy id
    # The latest rejected configuration, by Envoy id.
    config_rejections: Mapping[str, ConfigRejection] = field(default_factory=lambda: EMPTY_MAP)
    # Ids of Envoys that may not have applied the latest endpoints yet.
    unsynced_envoys: Set[str] = frozenset()
    # Control plane replicas that are registered but do not report their Envoys to this replica.
    unreachable_replicas: Set[str] = frozenset()
    # By Envoy id, then by node address: when the Envoy acknowledged that the node is closed to new sessions.
    # An Envoy that was disconnected has to acknowledge again.
    closed_acks: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: EMPTY_MAP)
    observing_since: float = 0.0  # when observation began
    node_metrics: Mapping[str, NodeMetrics] = field(default_factory=lambda: EMPTY_MAP)  # by address
    # Why node metrics are unavailable, as a sentence; empty: they are available.
    node_metrics_outage: str = ""
    # Zone that each Envoy reports for itself, by Envoy id.
    envoy_zones: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)

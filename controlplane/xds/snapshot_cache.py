"""The xDS resources of one plan for each Envoy profile, built when the first Envoy of it needs them.

What profiles have in common is built once: clusters and listeners depend on the settings alone, endpoints on
the plan and, where Envoys prefer local nodes, on the zone; live configurations on settings and plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from controlplane.config.settings import Settings, build_policy
from controlplane.model.plan import Plan
from controlplane.xds.resource_set import (
    Resource,
    ResourceSet,
    build_resource_set,
    digest_of,
    make_resource,
    resource_set_from_bodies,
)
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, ResourceType
from controlplane.xds.resources import listeners_and_clusters
from controlplane.xds.resources.endpoints import build_load_assignment, nodes_by_group, preferred_zones
from controlplane.xds.resources.live_config import (
    build_extension_config,
    render_live_config,
    with_random_padding,
)
from controlplane.xds.resources.profile import EnvoyProfile


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resources of one profile, under one `version`.

    `tls_requirement` names the setting because of which a profile without Tidevoy's module gets no listener;
    empty: none. `missing_group` is the profile's group if the settings have no such group, so that there is
    nothing to serve; empty: the group exists.
    """

    version: str
    collections: Mapping[ResourceType, ResourceSet]
    tls_requirement: str = ""
    missing_group: str = ""
    _with_empty: dict[frozenset[str], ResourceSet] = field(default_factory=dict, compare=False, repr=False)

    def endpoints(self, clusters: Set[str]) -> ResourceSet:
        """Return the endpoints for an Envoy with these clusters; empty sets for those of removed groups.

        An Envoy keeps such a cluster. Without an empty set it would route to the previous nodes for ever.
        """
        published = self.collections[ENDPOINTS]
        removed = frozenset(
            name
            for name in clusters - published.resources.keys()
            if listeners_and_clusters.is_node_cluster_name(name)
        )
        if not removed:
            return published
        if removed not in self._with_empty:
            empty = (_assignment_resource(name, build_load_assignment([], name)) for name in removed)
            self._with_empty[removed] = build_resource_set(ENDPOINTS, (*published.resources.values(), *empty))
        return self._with_empty[removed]


class StaticResources:
    """Clusters and listeners of one version of the settings: what does not depend on the plan."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._cache: dict[EnvoyProfile, tuple[ResourceSet, ResourceSet]] = {}

    def for_profile(self, profile: EnvoyProfile) -> tuple[ResourceSet, ResourceSet]:
        """Return the clusters and listeners of a profile; they are the same in each zone."""
        zoneless = profile.for_group_and_zone(profile.group, "")
        if zoneless not in self._cache:
            self._cache[zoneless] = (
                resource_set_from_bodies(
                    CLUSTER, listeners_and_clusters.build_clusters(self.settings, zoneless)
                ),
                resource_set_from_bodies(
                    LISTENER, listeners_and_clusters.build_listeners(self.settings, zoneless)
                ),
            )
        return self._cache[zoneless]


class SnapshotCache:
    """The snapshots of one plan by profile; equal plans and settings give equal versions in any process."""

    def __init__(self, plan: Plan | None = None, static_resources: StaticResources | None = None) -> None:
        """Without a plan, nothing is published yet."""
        self._plan = plan or Plan()
        self._static_resources = None if plan is None else static_resources
        self._cache: dict[EnvoyProfile, Snapshot] = {}
        self._endpoint_sets: dict[tuple[tuple[str, str, str], ...], ResourceSet] = {}
        self._live_config_sets: dict[tuple[tuple[str, str], ...], ResourceSet] = {}
        self._assignments: dict[tuple[str, str, str], Resource] = {}
        self._nodes_by_group = nodes_by_group(self._plan)
        self._preferred_zones = (
            preferred_zones(self._plan, build_policy(static_resources.settings).balance_policy)
            if static_resources
            else frozenset()
        )

    def get(self, profile: EnvoyProfile) -> Snapshot | None:
        """Return the snapshot of a profile; None: nothing is published yet."""
        return None if self._static_resources is None else self[profile]

    def __getitem__(self, profile: EnvoyProfile) -> Snapshot:
        if profile not in self._cache:
            if self._static_resources is None:
                raise KeyError(profile)
            self._cache[profile] = self._build(profile, self._static_resources)
        return self._cache[profile]

    def _build(self, profile: EnvoyProfile, static_resources: StaticResources) -> Snapshot:
        clusters, listeners = static_resources.for_profile(profile)
        group_listeners = listeners_and_clusters.group_listeners(static_resources.settings, profile.group)
        collections = {
            CLUSTER: clusters,
            ENDPOINTS: self._endpoints_for(group_listeners, profile.zone),
            LISTENER: listeners,
            # Also for profiles without the module: an Envoy keeps its listener when `xds.filter` changes.
            LIVE_CONFIG: self._live_configs_for(group_listeners),
        }
        parts = (part for kind, resources in collections.items() for part in (kind.url, resources.version))
        missing_group = "" if group_listeners else profile.group
        return Snapshot(
            digest_of(*parts), collections, static_resources.settings.tls.tls_requirement, missing_group
        )

    def _live_configs_for(self, group_listeners: list[listeners_and_clusters.GroupListener]) -> ResourceSet:
        """Return the live configurations of these listeners' groups; the same in each zone."""
        cache_key = tuple(
            (group_listener.live_config_name, group_listener.group) for group_listener in group_listeners
        )
        if cache_key not in self._live_config_sets:
            self._live_config_sets[cache_key] = build_resource_set(
                LIVE_CONFIG, (self._build_live_config(name, group) for name, group in cache_key)
            )
        return self._live_config_sets[cache_key]

    def _build_live_config(self, name: str, group: str) -> Resource:
        assert self._static_resources is not None
        nodes = self._nodes_by_group.get(group, [])
        text = render_live_config(self._plan, nodes, self._static_resources.settings, group)

        def encode(json_text: str) -> bytes:
            return listeners_and_clusters.to_any(LIVE_CONFIG, build_extension_config(name, json_text))

        return make_resource(name, encode(text), lambda: encode(with_random_padding(text)))

    def _endpoints_for(
        self, group_listeners: list[listeners_and_clusters.GroupListener], zone: str
    ) -> ResourceSet:
        """Return the endpoints of these listeners' clusters; a zone without nodes gets those of any zone."""
        cache_key = tuple(
            (
                group_listener.cluster_name,
                group_listener.group,
                zone if (group_listener.group, zone) in self._preferred_zones else "",
            )
            for group_listener in group_listeners
        )
        if cache_key not in self._endpoint_sets:
            self._endpoint_sets[cache_key] = build_resource_set(
                ENDPOINTS, (self._load_assignment(*assignment_key) for assignment_key in cache_key)
            )
        return self._endpoint_sets[cache_key]

    def _load_assignment(self, cluster: str, group: str, preferred_zone: str) -> Resource:
        key = (cluster, group, preferred_zone)
        if key not in self._assignments:
            nodes = self._nodes_by_group.get(group, [])
            self._assignments[key] = _assignment_resource(
                cluster, build_load_assignment(nodes, cluster, preferred_zone)
            )
        return self._assignments[key]


def build_snapshots(plan: Plan, settings: Settings) -> SnapshotCache:
    """Return the snapshots of a plan under these settings."""
    return SnapshotCache(plan, StaticResources(settings))


def _assignment_resource(cluster: str, message: bytes) -> Resource:
    return make_resource(cluster, listeners_and_clusters.to_any(ENDPOINTS, message))

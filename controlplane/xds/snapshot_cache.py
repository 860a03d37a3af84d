"""What each class of Envoy is to have of one plan, made when the first Envoy of that class wants it.

What classes have in common is made once: clusters and listeners depend on the settings alone, endpoints on
the plan and, where there are nodes nearby, on the zone; live configurations on the settings and the plan.
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
    """All that one class of Envoy is to have. `version` names it.

    `demand` is the setting for whose sake a class without Tidevoy's module has no listener; empty: none.
    `absent` is the group of the class when there is no such group, and so nothing to have; empty: there is.
    """

    version: str
    collections: Mapping[ResourceType, ResourceSet]
    tls_requirement: str = ""
    missing_group: str = ""
    _with_empty: dict[frozenset[str], ResourceSet] = field(default_factory=dict, compare=False, repr=False)

    def endpoints(self, clusters: Set[str]) -> ResourceSet:
        """The endpoints for an Envoy that has these clusters; an empty set for each whose group is no more.

        An Envoy keeps such a cluster. Unless it is told so, it would lead to the nodes of before for ever.
        """
        published = self.collections[ENDPOINTS]
        removed = frozenset(
            n for n in clusters - published.resources.keys() if listeners_and_clusters.is_node_cluster_name(n)
        )
        if not removed:
            return published
        if removed not in self._with_empty:
            empty = (_assignment_resource(name, build_load_assignment([], name)) for name in removed)
            self._with_empty[removed] = build_resource_set(ENDPOINTS, (*published.resources.values(), *empty))
        return self._with_empty[removed]


class StaticResources:
    """Clusters and listeners under some settings: what no plan changes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._cache: dict[EnvoyProfile, tuple[ResourceSet, ResourceSet]] = {}

    def for_profile(self, profile: EnvoyProfile) -> tuple[ResourceSet, ResourceSet]:
        """The clusters and the listeners of a class; they are the same in each zone."""
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
    """The snapshots of one plan, by class; equal plans and settings give equal versions in any process."""

    def __init__(self, plan: Plan | None = None, static_resources: StaticResources | None = None) -> None:
        """Without a plan nothing is published yet."""
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
        """The snapshot of a class; None: nothing is published yet."""
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
            # Also of classes without the module: an Envoy keeps its listener when the settings name another.
            LIVE_CONFIG: self._live_configs_for(group_listeners),
        }
        parts = (part for kind, held in collections.items() for part in (kind.url, held.version))
        missing_group = "" if group_listeners else profile.group
        return Snapshot(
            digest_of(*parts), collections, static_resources.settings.tls.tls_requirement, missing_group
        )

    def _live_configs_for(self, group_listeners: list[listeners_and_clusters.GroupListener]) -> ResourceSet:
        """The live configurations of these ports' groups; the same in each zone."""
        wanted = tuple(
            (group_listener.live_config_name, group_listener.group) for group_listener in group_listeners
        )
        if wanted not in self._live_config_sets:
            self._live_config_sets[wanted] = build_resource_set(
                LIVE_CONFIG, (self._build_live_config(*each) for each in wanted)
            )
        return self._live_config_sets[wanted]

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
        """The endpoints of these ports' clusters; those of a zone are those of all where it has no nodes."""
        wanted = tuple(
            (
                group_listener.cluster_name,
                group_listener.group,
                zone if (group_listener.group, zone) in self._preferred_zones else "",
            )
            for group_listener in group_listeners
        )
        if wanted not in self._endpoint_sets:
            self._endpoint_sets[wanted] = build_resource_set(
                ENDPOINTS, (self._load_assignment(*each) for each in wanted)
            )
        return self._endpoint_sets[wanted]

    def _load_assignment(self, cluster: str, group: str, preferred_zone: str) -> Resource:
        key = (cluster, group, preferred_zone)
        if key not in self._assignments:
            nodes = self._nodes_by_group.get(group, [])
            self._assignments[key] = _assignment_resource(
                cluster, build_load_assignment(nodes, cluster, preferred_zone)
            )
        return self._assignments[key]


def build_snapshots(plan: Plan, settings: Settings) -> SnapshotCache:
    """What is published of a plan under these settings."""
    return SnapshotCache(plan, StaticResources(settings))


def _assignment_resource(cluster: str, message: bytes) -> Resource:
    return make_resource(cluster, listeners_and_clusters.to_any(ENDPOINTS, message))

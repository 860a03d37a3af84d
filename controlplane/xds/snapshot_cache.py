"""The xDS resources of one plan for each Envoy profile, built when the first Envoy of the profile needs them.

Equal resources of several profiles are built once. Clusters and listeners depend only on the settings and the
profile. Endpoints depend on the plan and, if Envoys prefer local nodes, on the zone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import starmap

from controlplane.config import schema
from controlplane.config.loader import apply_reload
from controlplane.config.settings import Settings, build_policy
from controlplane.model.module_switches import SwitchOverrides
from controlplane.model.plan import Plan
from controlplane.xds.resource_set import (
    Resource,
    ResourceSet,
    build_resource_set,
    digest_of,
    make_resource,
    make_resource_with_live_settings,
    structures_of,
)
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, ResourceType
from controlplane.xds.resources.endpoints import build_load_assignment, nodes_by_group, preferred_zones
from controlplane.xds.resources.listeners_and_clusters import (
    GroupListener,
    build_clusters,
    build_listeners,
    group_listeners,
    is_node_cluster_name,
    to_any,
)
from controlplane.xds.resources.live_config import (
    build_extension_config,
    render_live_config,
    render_nodes,
    with_random_padding,
)
from controlplane.xds.resources.profile import EnvoyProfile

# How many earlier settings are kept, to name the settings that an Envoy has not applied.
_MAX_EARLIER_SETTINGS = 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resources of one profile, under one `version`.

    `module_requirement` says which settings deny a listener to profiles without the module; empty if none.
    `missing_group` is the profile's group if the settings have no such group; otherwise it is empty.
    """

    version: str
    resource_sets: Mapping[ResourceType, ResourceSet]
    module_requirement: str = ""
    missing_group: str = ""
    _endpoints_by_removed_clusters: dict[frozenset[str], ResourceSet] = field(
        default_factory=dict, compare=False, repr=False
    )

    def endpoints(self, clusters: Set[str]) -> ResourceSet:
        """Return the endpoints for an Envoy with these clusters: an empty assignment for a removed group.

        Without it, the Envoy would route to the previous nodes of the removed group for ever.
        """
        published = self.resource_sets[ENDPOINTS]
        removed = frozenset(
            name for name in clusters - published.resources.keys() if is_node_cluster_name(name)
        )
        if not removed:
            return published
        if removed not in self._endpoints_by_removed_clusters:
            empty = (_assignment_resource(name, build_load_assignment([], name)) for name in removed)
            self._endpoints_by_removed_clusters[removed] = build_resource_set(
                ENDPOINTS, (*published.resources.values(), *empty)
            )
        return self._endpoints_by_removed_clusters[removed]


class StaticResources:
    """The clusters and listeners of all profiles under some settings. They do not depend on the plan."""

    def __init__(self, settings: Settings, previous: StaticResources | None = None) -> None:
        """`previous`: those before a reload, kept to name the settings that Envoys still use."""
        self.settings = settings
        self._earlier: tuple[StaticResources, ...] = ()
        if previous is not None:
            added = () if previous.settings == settings else (StaticResources(previous.settings),)
            self._earlier = (*added, *previous._earlier)[:_MAX_EARLIER_SETTINGS]
        self._changed_settings: dict[tuple[EnvoyProfile, frozenset[str]], tuple[str, ...]] = {}
        self._without_live_settings = schema.with_defaults_of_reloadable(settings)
        self._cache: dict[EnvoyProfile, tuple[ResourceSet, ResourceSet]] = {}

    def for_profile(self, profile: EnvoyProfile) -> tuple[ResourceSet, ResourceSet]:
        """Return the clusters and listeners of a profile, the same in each zone and for each plan."""
        profile = profile.for_all_plans
        if profile not in self._cache:
            self._cache[profile] = (
                build_resource_set(CLUSTER, self._build(build_clusters, profile)),
                build_resource_set(LISTENER, self._build(build_listeners, profile)),
            )
        return self._cache[profile]

    def changed_settings(self, profile: EnvoyProfile, held: frozenset[str]) -> tuple[str, ...]:
        """Return which settings have changed since an Envoy got the resources that it holds.

        `held`: what identifies these resources (`resource_set.structures_of`).
        Only settings that such an Envoy does not apply while it runs. Empty if it is not known from which
        settings the resources were built, such as after a restart of the control plane.
        """
        key = (profile, held)
        if key not in self._changed_settings:
            earlier = (one.settings for one in self._earlier if held <= one._structures(profile))
            self._changed_settings[key] = self._changed_since(next(earlier, self.settings), profile)
        return self._changed_settings[key]

    def _changed_since(self, earlier: Settings, profile: EnvoyProfile) -> tuple[str, ...]:
        changes = apply_reload(earlier, self.settings)[1]
        live = () if profile.gets_settings_live else changes.applied_by_module
        return (*changes.needs_new_envoys, *live)

    def _structures(self, profile: EnvoyProfile) -> frozenset[str]:
        return structures_of(
            version for resources in self.for_profile(profile) for version in resources.versions.values()
        )

    def _build(
        self, build: Callable[[Settings, EnvoyProfile], Mapping[str, bytes]], profile: EnvoyProfile
    ) -> list[Resource]:
        bodies = build(self.settings, profile)
        if not profile.gets_settings_live:
            return [make_resource(name, body) for name, body in bodies.items()]
        structures = build(self._without_live_settings, profile)
        return [
            make_resource_with_live_settings(name, body, structures[name]) for name, body in bodies.items()
        ]


class SnapshotCache:
    """The snapshots of one plan by profile. Equal plans and settings give equal versions in any process."""

    def __init__(self, plan: Plan | None = None, static_resources: StaticResources | None = None) -> None:
        """Without a plan, there are no snapshots, since nothing is published yet."""
        self._plan = plan or Plan()
        self._static_resources = None if plan is None else static_resources
        self._cache: dict[EnvoyProfile, Snapshot] = {}
        # A key lists each group listener with its preferred zone, which is empty if there is none.
        self._endpoint_sets: dict[tuple[tuple[GroupListener, str], ...], ResourceSet] = {}
        self._assignments: dict[tuple[GroupListener, str], Resource] = {}
        self._live_config_sets: dict[
            tuple[tuple[GroupListener, ...], SwitchOverrides, frozenset[str], str], ResourceSet
        ] = {}
        self._nodes_by_group = nodes_by_group(self._plan)
        self._rendered_nodes: dict[str, str] = {}  # by group, for the live configurations
        self._preferred_zones = (
            preferred_zones(self._plan, build_policy(static_resources.settings).balance_policy)
            if static_resources
            else frozenset()
        )

    def get(self, profile: EnvoyProfile) -> Snapshot | None:
        """Return the snapshot of a profile, or None if nothing is published yet."""
        return None if self._static_resources is None else self[profile]

    def changed_settings(self, profile: EnvoyProfile, held: frozenset[str]) -> tuple[str, ...]:
        """Return which settings have changed; see `StaticResources.changed_settings`."""
        static_resources = self._static_resources
        return () if static_resources is None else static_resources.changed_settings(profile, held)

    def profile_of(self, profile: EnvoyProfile, envoy: str) -> EnvoyProfile:
        """Return the profile with what this plan has for an Envoy."""
        return profile.for_plan(self._plan, envoy)

    def __getitem__(self, profile: EnvoyProfile) -> Snapshot:
        if profile not in self._cache:
            if self._static_resources is None:
                raise KeyError(profile)
            self._cache[profile] = self._build(profile, self._static_resources)
        return self._cache[profile]

    def _build(self, profile: EnvoyProfile, static_resources: StaticResources) -> Snapshot:
        settings = static_resources.settings
        clusters, listeners = static_resources.for_profile(profile)
        groups = tuple(group_listeners(settings, profile.group))
        resource_sets = {
            CLUSTER: clusters,
            ENDPOINTS: self._endpoints_for(groups, profile.zone),
            LISTENER: listeners,
            # Also for profiles without the module, because an Envoy keeps a listener with the module when
            # `xds.filter` changes.
            LIVE_CONFIG: self._live_configs_for(groups, settings, profile),
        }
        version = digest_of(
            *(part for type_, item in resource_sets.items() for part in (type_.url, item.version))
        )
        missing_group = "" if groups else profile.group
        return Snapshot(version, resource_sets, settings.module_requirement, missing_group)

    def _live_configs_for(
        self, groups: tuple[GroupListener, ...], settings: Settings, profile: EnvoyProfile
    ) -> ResourceSet:
        """Return the live configurations of these groups, which are the same in each zone."""
        key = (groups, profile.overrides, profile.features, profile.capturing_envoy)
        if key not in self._live_config_sets:
            self._live_config_sets[key] = build_resource_set(
                LIVE_CONFIG, (self._build_live_config(group, settings, profile) for group in groups)
            )
        return self._live_config_sets[key]

    def _build_live_config(self, group: GroupListener, settings: Settings, profile: EnvoyProfile) -> Resource:
        name = group.live_config_name
        if group.group not in self._rendered_nodes:
            nodes = self._nodes_by_group.get(group.group, [])
            self._rendered_nodes[group.group] = render_nodes(self._plan, nodes)
        text = render_live_config(
            self._plan,
            self._rendered_nodes[group.group],
            settings,
            group.group,
            profile.overrides,
            profile.features,
            profile.capturing_envoy,
        )

        def encode(json_text: str) -> bytes:
            return to_any(LIVE_CONFIG, build_extension_config(name, json_text))

        return make_resource(name, encode(text), lambda: encode(with_random_padding(text)))

    def _endpoints_for(self, groups: tuple[GroupListener, ...], zone: str) -> ResourceSet:
        cache_key = tuple(
            (group, zone if (group.group, zone) in self._preferred_zones else "") for group in groups
        )
        if cache_key not in self._endpoint_sets:
            assignments = starmap(self._load_assignment, cache_key)
            self._endpoint_sets[cache_key] = build_resource_set(ENDPOINTS, assignments)
        return self._endpoint_sets[cache_key]

    def _load_assignment(self, group: GroupListener, preferred_zone: str) -> Resource:
        key = (group, preferred_zone)
        if key not in self._assignments:
            nodes, cluster = self._nodes_by_group.get(group.group, []), group.cluster_name
            self._assignments[key] = _assignment_resource(
                cluster, build_load_assignment(nodes, cluster, preferred_zone)
            )
        return self._assignments[key]


def build_snapshots(plan: Plan, settings: Settings) -> SnapshotCache:
    """Return the snapshots of a plan under these settings."""
    return SnapshotCache(plan, StaticResources(settings))


def _assignment_resource(cluster: str, message: bytes) -> Resource:
    return make_resource(cluster, to_any(ENDPOINTS, message))

"""One Envoy's stream: its subscriptions, and the choice of the next message. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.discovery_request import parse_envoy_node, parse_request
from controlplane.xds.resource_set import ResourceSet, structures_of
from controlplane.xds.resource_type import (
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    LIVE_CONFIG,
    PUSH_ORDER,
    RESOURCE_TYPES_BY_URL,
    ResourceType,
)
from controlplane.xds.resources.listeners_and_clusters import LISTENER_NAME, cluster_name_for
from controlplane.xds.resources.profile import (
    MODULE_PROFILE,
    PROFILES,
    EnvoyProfile,
    FilterSetting,
    candidate_profiles,
    module_problem,
)
from controlplane.xds.snapshot_cache import Snapshot, SnapshotCache
from controlplane.xds.subscription import Subscription


@dataclass(frozen=True, slots=True)
class StreamNack:
    """A NACK. `next_profile` is the profile that the Envoy gets from now on; None: its profile stays."""

    resource_type: ResourceType
    version: str
    message: str
    next_profile: EnvoyProfile | None = None


class Stream:
    """The state of one Envoy's stream. `receive` takes its messages, `next_message` returns responses."""

    def __init__(
        self,
        variant: type[Subscription],
        address: str,
        first: bytes,
        filter_setting: FilterSetting,
        *,
        certificate_until: float | None = None,
    ) -> None:
        """Start from `first`, the stream's first message. Raises BadRequest.

        `variant` is the subscription class of the protocol variant. `certificate_until` is when the Envoy's
        client certificate expires, in Unix time, or None without a certificate.
        """
        request = parse_request(variant.request_class, first)
        self.envoy_node = parse_envoy_node(request, first)
        self.address = address
        self.certificate_until = certificate_until
        self._variant = variant
        self._subscriptions = {item: variant(item) for item in PUSH_ORDER}  # in the order of sending
        # By rejected profile: the type and version of the resource that the Envoy rejected.
        self._rejected_profiles: dict[EnvoyProfile, tuple[ResourceType, str]] = {}
        self.profile = self._best_profile(filter_setting)
        """The Envoy gets the snapshots of this profile, with its own switches of the module."""
        self._filter_setting = filter_setting
        self._acked_version = ""
        self._handle(request)

    def set_filter(self, filter_setting: FilterSetting) -> None:
        """Apply a changed filter setting. It affects the Envoy only if it has no listener yet."""
        self._filter_setting, self.profile = filter_setting, self._best_profile(filter_setting)

    def receive(self, data: bytes) -> StreamNack | None:
        """Process a message and return the NACK in it, if any. Raises BadRequest."""
        return self._handle(parse_request(self._variant.request_class, data))

    def next_message(self, snapshots: SnapshotCache) -> bytes | None:
        """Return the next message to send, or None if everything was sent.

        The cluster `tidb` and the listener `sql` come first: if the Envoy rejects one, its profile changes.
        Clusters and listeners of groups follow, each listener after its cluster.
        """
        self._retry_rejected(snapshots)
        snapshot = self._snapshot(snapshots)
        if snapshot is None:
            return None
        for resource_type, subscription in self._subscriptions.items():
            if resource_type is LISTENER and self._needs_cluster_first(snapshot):
                continue
            message = subscription.next_response(
                self._published(resource_type, snapshot),
                may_replace=resource_type is CLUSTER and self._has_certainly_no_listener,
                allowed_names=self._allowed_names(resource_type, snapshot),
            )
            if message is not None:
                if resource_type is CLUSTER:
                    self._subscriptions[ENDPOINTS].mark_all_due()
                return message
        for resource_type, subscription in reversed(self._subscriptions.items()):
            message = subscription.next_removal(self._published(resource_type, snapshot))
            if message is not None:
                return message
        return None

    def acked_version(self, snapshots: SnapshotCache) -> str:
        """Return the version of the latest snapshot that the Envoy acknowledged completely, or empty."""
        snapshot = self._snapshot(snapshots)
        if (
            snapshot is not None
            and not snapshot.missing_group
            and not self._is_listener_withheld(snapshot)
            and all(
                subscription.is_synced(self._published(resource_type, snapshot))
                for resource_type, subscription in self._subscriptions.items()
            )
        ):
            self._acked_version = snapshot.version
        return self._acked_version

    def published_version(self, snapshots: SnapshotCache) -> str:
        """Return the version of the snapshot that is published for this Envoy."""
        snapshot = self._snapshot(snapshots)
        return snapshot.version if snapshot is not None else ""

    def has_acknowledged_endpoints(self, snapshots: SnapshotCache) -> bool:
        """Whether the Envoy has acknowledged the latest endpoints, or has no clusters.

        With Tidevoy's module, the Envoy must also have acknowledged the latest live configuration.
        """
        snapshot = self._snapshot(snapshots)
        if snapshot is None:
            return False  # nothing is published yet; the Envoy may use endpoints from an earlier stream
        if not self._subscriptions[ENDPOINTS].is_started:
            # An Envoy that has clusters, but has not asked for endpoints on this stream, has reconnected. It
            # still uses the endpoints from an earlier stream.
            return not self._subscriptions[CLUSTER].has_resources
        return all(
            self._subscriptions[resource_type].is_synced(self._published(resource_type, snapshot))
            for resource_type in (ENDPOINTS, LIVE_CONFIG)
        )

    def stale_resources(self, snapshots: SnapshotCache) -> tuple[str, ...]:
        """Return the resource types that this Envoy has in another version than a new Envoy would get."""
        return tuple(resource_type.display_name for resource_type in self._stale_types(snapshots))

    def stale_settings(self, snapshots: SnapshotCache) -> tuple[str, ...]:
        """Return the settings that only a new Envoy would apply; empty if they are not known."""
        snapshot = self._snapshot(snapshots)
        if snapshot is None:
            return ()
        stale: frozenset[str] = frozenset()
        for resource_type in self._stale_types(snapshots):
            published = structures_of(snapshot.resource_sets[resource_type].versions.values())
            stale |= self._subscriptions[resource_type].held_structures() - published
        # After a change of `xds.filter`, the resources are those of another profile.
        profiles = dict.fromkeys((self.profile, *(each.for_envoy(self.envoy_node) for each in PROFILES)))
        changed = (snapshots.changed_settings(profile, stale) for profile in profiles if stale)
        return next(filter(None, changed), ())

    def _stale_types(self, snapshots: SnapshotCache) -> list[ResourceType]:
        snapshot = self._snapshot(snapshots)
        if snapshot is None:
            return []
        return [
            resource_type
            for resource_type, subscription in self._subscriptions.items()
            if subscription.is_stale(snapshot.resource_sets[resource_type])
        ]

    def active_filter(self, snapshots: SnapshotCache) -> str:
        """Return the MySQL filter in the Envoy's listener; without a listener, its future filter."""
        listener = self._subscriptions[LISTENER]
        if listener.has_resources:
            for profile in PROFILES:
                snapshot = self._snapshot(snapshots, profile.for_envoy(self.envoy_node))
                listeners = snapshot.resource_sets[LISTENER] if snapshot is not None else None
                if listeners and any(
                    listener.has_resource(resource) for resource in listeners.resources.values()
                ):
                    return profile.filter
        return self.profile.filter

    def problem(self, snapshots: SnapshotCache) -> str:
        """Return why the Envoy serves no clients, runs older settings or lacks the module; else empty."""
        snapshot, listener = self._snapshot(snapshots), self._subscriptions[LISTENER]
        module_problem_text = self._module_problem()
        if snapshot is not None and snapshot.missing_group:
            effect = "its listener has no nodes" if self._has_listener else "it gets no configuration"
            return f"{effect}, because no group in the settings is named {snapshot.missing_group}"
        if snapshot is not None and listener.is_started and snapshot.module_requirement:
            if listener.has_resources and self.stale_resources(snapshots):
                first = f", but first fix this: {module_problem_text}" if module_problem_text else ""
                reason = f"it still runs older settings, although {snapshot.module_requirement}"
                return f"{reason}; restart that Envoy{first}"
            if not listener.has_resources and self._is_listener_withheld(snapshot):
                return f"it gets no listener, because {snapshot.module_requirement} and {module_problem_text}"
        # Otherwise a missing module is a problem only if the Envoy should have it: its bootstrap names the
        # module's version, or it has rejected the module.
        has_rejected_module = MODULE_PROFILE.for_envoy(self.envoy_node) in self._rejected_profiles
        return module_problem_text if self.envoy_node.module_version or has_rejected_module else ""

    def _snapshot(self, snapshots: SnapshotCache, profile: EnvoyProfile | None = None) -> Snapshot | None:
        """Return this Envoy's snapshot of a profile, by default of its own."""
        return snapshots.get(snapshots.profile_of(profile or self.profile, self.envoy_node.id))

    def _handle(self, request: Any) -> StreamNack | None:
        resource_type = RESOURCE_TYPES_BY_URL.get(request.type_url)
        if resource_type is None:
            return None  # the control plane does not publish this type, so it sends no response
        result = self._subscriptions[resource_type].receive(request)
        if result is None or not result.error_detail:
            return None
        next_profile = None
        if resource_type.immutable and not self._has_listener:
            self._rejected_profiles[self.profile] = (resource_type, result.version)
            best = self._best_profile(self._filter_setting)
            next_profile = best if best != self.profile else None
            self.profile = best
        return StreamNack(resource_type, result.version, result.error_detail, next_profile)

    def _retry_rejected(self, snapshots: SnapshotCache) -> None:
        """Retry rejected profiles whose rejected resource has changed, if the Envoy has no listener."""
        if not self._rejected_profiles or self._has_listener:
            return
        self._rejected_profiles = {
            profile: (resource_type, version)
            for profile, (resource_type, version) in self._rejected_profiles.items()
            if (snapshot := self._snapshot(snapshots, profile))
            and snapshot.resource_sets[resource_type].subset_by_version(version)
        }
        self.profile = self._best_profile(self._filter_setting)

    def _best_profile(self, filter_setting: FilterSetting) -> EnvoyProfile:
        """Return the best profile that the Envoy has not rejected; if it rejected all, the simplest one."""
        profiles = [
            profile.for_envoy(self.envoy_node)
            for profile in candidate_profiles(filter_setting, self.envoy_node)
        ]
        return next((profile for profile in profiles if profile not in self._rejected_profiles), profiles[-1])

    def _published(self, resource_type: ResourceType, snapshot: Snapshot) -> ResourceSet:
        if resource_type is ENDPOINTS:
            return snapshot.endpoints(self._subscriptions[ENDPOINTS].subscribed_names)
        return snapshot.resource_sets[resource_type]

    def _allowed_names(self, resource_type: ResourceType, snapshot: Snapshot) -> frozenset[str] | None:
        """Return the names of the resources that may be added to the Envoy's resources; None means all."""
        if not resource_type.immutable:
            return None
        if not self._has_listener:
            return frozenset((CLUSTER_NAME, LISTENER_NAME))
        clusters, subscription = snapshot.resource_sets[CLUSTER], self._subscriptions[CLUSTER]
        if resource_type is CLUSTER or not subscription.is_started:
            return None
        held = {name for name, item in clusters.resources.items() if subscription.has_resource(item)}
        listeners = snapshot.resource_sets[LISTENER].resources
        return frozenset(name for name in listeners if cluster_name_for(name) in held)

    def _module_problem(self) -> str:
        """Return why the Envoy does not get the module; empty if it does, or if the settings exclude it."""
        if self.profile.has_module or self._filter_setting in ("contrib", "none"):
            return ""
        if MODULE_PROFILE.for_envoy(self.envoy_node) in self._rejected_profiles:
            return "it rejected Tidevoy's module (see its last NACK)"
        return module_problem(self.envoy_node)

    def _is_listener_withheld(self, snapshot: Snapshot) -> bool:
        """Whether this profile gets no listener because it lacks the module."""
        return bool(snapshot.module_requirement) and not snapshot.resource_sets[LISTENER].resources

    @property
    def _has_listener(self) -> bool:
        return self._subscriptions[LISTENER].has_resources

    @property
    def _has_certainly_no_listener(self) -> bool:
        """Whether the Envoy certainly has no listener.

        A reconnected Envoy may have a listener; its first request for listeners says whether it has.
        """
        listener = self._subscriptions[LISTENER]
        return listener.is_started and not listener.has_resources and not listener.ack_pending

    def _needs_cluster_first(self, snapshot: Snapshot) -> bool:
        """Whether the Envoy must get this snapshot's cluster `tidb` before its first listener."""
        clusters = self._subscriptions[CLUSTER]
        if not clusters.is_started or self._has_listener:
            return False
        published = snapshot.resource_sets[CLUSTER]
        default_cluster = published.resources.get(CLUSTER_NAME)
        return default_cluster is None or not clusters.has_resource(default_cluster)

"""One Envoy's stream: its subscriptions, and which message is sent next. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.discovery_request import BadRequest, EnvoyNode, parse_delta, parse_sotw
from controlplane.xds.resource_set import ResourceSet
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
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription


@dataclass(frozen=True, slots=True)
class XdsVariant:
    """A variant of the protocol: the parser of its requests and the class of its subscriptions."""

    parse: Callable[[bytes], Any]
    new_subscription: Callable[[ResourceType], Any]


SOTW = XdsVariant(parse_sotw, SotwSubscription)
DELTA = XdsVariant(parse_delta, DeltaSubscription)


@dataclass(frozen=True, slots=True)
class StreamNack:
    """A NACK. `fallback` is the profile that is tried instead while the Envoy has no listener."""

    kind: ResourceType
    version: str
    message: str
    fallback: EnvoyProfile | None = None


class Stream:
    """What one Envoy holds and lacks: `receive` takes its messages, `next_message` returns what to send."""

    def __init__(
        self,
        variant: XdsVariant,
        address: str,
        first: bytes,
        filter_setting: FilterSetting,
        *,
        certificate_until: float | None = None,
    ) -> None:
        """Start from `first`, the stream's first message. Raises BadRequest.

        `certificate_until` is the expiry of the Envoy's client certificate in Unix time; None: it sent none.
        """
        request = variant.parse(first)
        if request.envoy_node is None or not request.envoy_node.id:
            raise BadRequest("it has no node.id; give every Envoy a unique one (--service-node)")
        self.envoy_node: EnvoyNode = request.envoy_node
        self.address = address
        self.certificate_until = certificate_until
        self._variant = variant
        self._subscriptions: dict[ResourceType, Any] = {}
        # Profile -> type and version of the resource that the Envoy rejected.
        self._rejected_profiles: dict[EnvoyProfile, tuple[ResourceType, str]] = {}
        self._profile = self._best_profile(filter_setting)
        self._filter_setting = filter_setting
        self._acked_version = ""
        self._handle(request)

    def set_filter(self, filter_setting: FilterSetting) -> None:
        """Apply a changed filter setting; it affects only an Envoy that has no listener yet."""
        self._filter_setting, self._profile = filter_setting, self._best_profile(filter_setting)

    def receive(self, data: bytes) -> StreamNack | None:
        """Process a message and return the NACK in it, if any. Raises BadRequest."""
        return self._handle(self._variant.parse(data))

    @property
    def profile(self) -> EnvoyProfile:
        """The profile whose snapshots this Envoy gets now."""
        return self._profile

    def next_message(self, snapshots: SnapshotCache) -> bytes | None:
        """Return the next message to send, or None if the Envoy has, or was sent, everything.

        The cluster and listener that every Envoy has come first: they decide the Envoy's profile. Those of
        groups follow, each listener after its cluster.
        """
        self._retry_rejected(snapshots)
        snapshot = snapshots.get(self._profile)
        if snapshot is None:
            return None
        for kind, subscription in self._subscriptions_in_order(PUSH_ORDER):
            if kind is LISTENER and self._is_cluster_missing(snapshot):
                continue
            replaces = kind is CLUSTER and self._is_confirmed_empty
            published, allowed_names = self._published(kind, snapshot), self._allowed_names(kind, snapshot)
            message: bytes | None = subscription.next_response(
                published, replaces=replaces, allowed_names=allowed_names
            )
            if message is not None:
                if kind is CLUSTER and ENDPOINTS in self._subscriptions:
                    self._subscriptions[ENDPOINTS].mark_all_due()
                return message
        for kind, subscription in self._subscriptions_in_order(reversed(PUSH_ORDER)):
            message = subscription.next_removal(self._published(kind, snapshot))
            if message is not None:
                return message
        return None

    def acked_version(self, snapshots: SnapshotCache) -> str:
        """Return the latest snapshot version acknowledged as a whole; empty: none on this stream."""
        snapshot = snapshots.get(self._profile)
        if (
            snapshot is not None
            and not snapshot.missing_group
            and not self._is_listener_withheld(snapshot)
            and all(
                subscription.is_synced(self._published(kind, snapshot))
                for kind, subscription in self._subscriptions.items()
            )
        ):
            self._acked_version = snapshot.version
        return self._acked_version

    def published_version(self, snapshots: SnapshotCache) -> str:
        """Return the version of the snapshot that this Envoy is to have now."""
        snapshot = snapshots.get(self._profile)
        return snapshot.version if snapshot is not None else ""

    def eds_acked(self, snapshots: SnapshotCache) -> bool:
        """Whether the Envoy routes by the endpoints that were published last, or by none at all.

        With the module it must also have acknowledged the latest live configuration.
        """
        snapshot, endpoints = snapshots.get(self._profile), self._subscriptions.get(ENDPOINTS)
        if snapshot is None:
            return False  # nothing is published yet; the Envoy may route by endpoints from an earlier stream
        if endpoints is None:
            clusters = self._subscriptions.get(CLUSTER)
            # A reconnected Envoy with clusters has just not asked for its endpoints yet.
            return clusters is None or not clusters.has_resources
        live = self._subscriptions.get(LIVE_CONFIG)
        is_synced: bool = endpoints.is_synced(self._published(ENDPOINTS, snapshot)) and (
            live is None or live.is_synced(self._published(LIVE_CONFIG, snapshot))
        )
        return is_synced

    def stale_resources(self, snapshots: SnapshotCache) -> tuple[str, ...]:
        """Return the resource types that the Envoy runs in another version than new Envoys get."""
        snapshot = snapshots.get(self._profile)
        if snapshot is None:
            return ()
        return tuple(
            kind.display_name
            for kind, subscription in self._subscriptions_in_order(PUSH_ORDER)
            if subscription.is_stale(snapshot.collections[kind])
        )

    def active_filter(self, snapshots: SnapshotCache) -> str:
        """Return the MySQL filter that the Envoy runs according to its listener, or else will get."""
        listener = self._subscriptions.get(LISTENER)
        if listener is not None and listener.has_resources:
            for profile in map(self._in_own_location, PROFILES):
                snapshot = snapshots.get(profile)
                listeners = snapshot.collections[LISTENER] if snapshot is not None else None
                if listeners and any(
                    listener.has_resource(resource, listeners) for resource in listeners.resources.values()
                ):
                    return profile.filter
        return self._profile.filter

    def problem(self, snapshots: SnapshotCache) -> str:
        """Return why the Envoy serves no clients, or lacks something it should have; empty: no problem."""
        snapshot, listener = snapshots.get(self._profile), self._subscriptions.get(LISTENER)
        module_problem_text = self._module_problem()
        if snapshot is not None and snapshot.missing_group:
            effect = "its listener has no nodes" if self._has_listener else "it gets no configuration"
            return f"{effect}, because no group in the settings is named {snapshot.missing_group}"
        if snapshot is not None and listener is not None and snapshot.tls_requirement:
            if listener.has_resources and self.stale_resources(snapshots):
                return (
                    f"it still runs older settings, although {snapshot.tls_requirement}; restart that Envoy"
                    + (f", but first fix this: {module_problem_text}" if module_problem_text else "")
                )
            if not listener.has_resources and self._is_listener_withheld(snapshot):
                return f"it gets no listener, because {snapshot.tls_requirement} and {module_problem_text}"
        # A missing module is no problem for an Envoy that does not claim to have one.
        return (
            module_problem_text
            if self.envoy_node.capabilities.module_version
            or self._in_own_location(MODULE_PROFILE) in self._rejected_profiles
            else ""
        )

    def _subscriptions_in_order(self, kinds: Iterable[ResourceType]) -> Iterator[tuple[ResourceType, Any]]:
        return ((kind, self._subscriptions[kind]) for kind in kinds if kind in self._subscriptions)

    def _handle(self, request: Any) -> StreamNack | None:
        kind = RESOURCE_TYPES_BY_URL.get(request.type_url)
        if kind is None:
            return None  # a type that we do not publish; without a response the Envoy stays as it is
        subscription = self._subscriptions.get(kind)
        if subscription is None:
            subscription = self._subscriptions[kind] = self._variant.new_subscription(kind)
        result = subscription.receive(request)
        if result is None or not result.error_detail:
            return None
        fallback = None
        if kind.immutable and not self._has_listener:
            self._rejected_profiles[self._profile] = (kind, result.version)
            best = self._best_profile(self._filter_setting)
            fallback = best if best != self._profile else None
            self._profile = best
        return StreamNack(kind, result.version, result.error_detail, fallback)

    def _retry_rejected(self, snapshots: SnapshotCache) -> None:
        """Retry a rejected profile when a reload changed what was rejected and there is no listener yet."""
        if not self._rejected_profiles or self._has_listener:
            return
        self._rejected_profiles = {
            profile: (kind, version)
            for profile, (kind, version) in self._rejected_profiles.items()
            if (snapshot := snapshots.get(profile)) and snapshot.collections[kind].subset_by_version(version)
        }
        self._profile = self._best_profile(self._filter_setting)

    def _best_profile(self, filter_setting: FilterSetting) -> EnvoyProfile:
        """Return the best profile that the Envoy has not rejected, else the simplest one."""
        profiles = [
            self._in_own_location(profile)
            for profile in candidate_profiles(filter_setting, self.envoy_node.capabilities)
        ]
        return next((profile for profile in profiles if profile not in self._rejected_profiles), profiles[-1])

    def _in_own_location(self, profile: EnvoyProfile) -> EnvoyProfile:
        return profile.for_group_and_zone(self.envoy_node.group, self.envoy_node.zone)

    def _published(self, kind: ResourceType, snapshot: Snapshot) -> ResourceSet:
        """Return all published resources of one type for this Envoy."""
        if kind is ENDPOINTS and ENDPOINTS in self._subscriptions:
            return snapshot.endpoints(self._subscriptions[ENDPOINTS].subscribed_names)
        return snapshot.collections[kind]

    def _allowed_names(self, kind: ResourceType, snapshot: Snapshot) -> frozenset[str] | None:
        """Return the names of resources that may be added to what the Envoy holds; None: all."""
        if not kind.immutable:
            return None
        if not self._has_listener:
            return frozenset((CLUSTER_NAME, LISTENER_NAME))
        clusters, cluster_subscription = snapshot.collections[CLUSTER], self._subscriptions.get(CLUSTER)
        if kind is CLUSTER or cluster_subscription is None:
            return None
        held_clusters = {
            name
            for name, cluster in clusters.resources.items()
            if cluster_subscription.has_resource(cluster, clusters)
        }
        return frozenset(
            name
            for name in snapshot.collections[LISTENER].resources
            if cluster_name_for(name) in held_clusters
        )

    def _module_problem(self) -> str:
        """Return why the Envoy does not have the module profile; empty: it has, or is not meant to."""
        if self._profile.has_module or self._filter_setting in ("contrib", "none"):
            return ""
        if self._in_own_location(MODULE_PROFILE) in self._rejected_profiles:
            return "it rejected Tidevoy's module (see its last NACK)"
        return module_problem(self.envoy_node.capabilities)

    def _is_listener_withheld(self, snapshot: Snapshot) -> bool:
        """Whether a TLS requirement of the settings leaves this profile without a listener."""
        return bool(snapshot.tls_requirement) and not snapshot.collections[LISTENER].resources

    @property
    def _has_listener(self) -> bool:
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and listener.has_resources

    @property
    def _is_confirmed_empty(self) -> bool:
        """Whether the Envoy surely has no listener: a reconnected one may, until it asks for listeners."""
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and not listener.has_resources and not listener.ack_pending

    def _is_cluster_missing(self, snapshot: Snapshot) -> bool:
        """Whether a first listener would use a cluster of another profile, or one that was rejected."""
        clusters = self._subscriptions.get(CLUSTER)
        if clusters is None or self._has_listener:
            return False
        offered = snapshot.collections[CLUSTER]
        default_cluster = offered.resources.get(CLUSTER_NAME)
        return default_cluster is None or not clusters.has_resource(default_cluster, offered)

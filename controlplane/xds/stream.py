"""One Envoy's stream: its subscriptions, in the order in which they may be served. No I/O."""

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
    """One of the two forms of the protocol: how its requests are read and its subscriptions kept."""

    parse: Callable[[bytes], Any]
    new_subscription: Callable[[ResourceType], Any]


SOTW = XdsVariant(parse_sotw, SotwSubscription)
DELTA = XdsVariant(parse_delta, DeltaSubscription)


@dataclass(frozen=True, slots=True)
class StreamNack:
    """A NACK. `fell_back_to` is the class that is tried instead, while the Envoy has no listener."""

    kind: ResourceType
    version: str
    message: str
    fallback: EnvoyProfile | None = None


class Stream:
    """What one Envoy has and lacks. `feed` its messages; `next` gives what to send."""

    def __init__(
        self,
        variant: XdsVariant,
        address: str,
        first: bytes,
        filter_setting: FilterSetting,
        *,
        certificate_until: float | None = None,
    ) -> None:
        """`first` is the stream's first message, `address` the Envoy's, `wanted` the setting. BadRequest.

        `certificate_until` is when the certificate ends that the Envoy has shown; None: it showed none.
        """
        request = variant.parse(first)
        if request.envoy_node is None or not request.envoy_node.id:
            raise BadRequest("it names no node.id; give every Envoy one of its own (--service-node)")
        self.envoy_node: EnvoyNode = request.envoy_node
        self.address = address
        self.certificate_until = certificate_until
        self._variant = variant
        self._subscriptions: dict[ResourceType, Any] = {}
        self._rejected_profiles: dict[
            EnvoyProfile, tuple[ResourceType, str]
        ] = {}  # and which version of what it was
        self._profile = self._best_profile(filter_setting)
        self._filter_setting = filter_setting
        self._acked_version = ""
        self._handle(request)

    def set_filter(self, filter_setting: FilterSetting) -> None:
        """Take over a changed setting of the filter; it reaches only an Envoy that has no listener yet."""
        self._filter_setting, self._profile = filter_setting, self._best_profile(filter_setting)

    def receive(self, data: bytes) -> StreamNack | None:
        """Take in a message; the refusal, if it is one. BadRequest."""
        return self._handle(self._variant.parse(data))

    @property
    def profile(self) -> EnvoyProfile:
        """The class whose snapshots are for this Envoy now."""
        return self._profile

    def next_message(self, snapshots: SnapshotCache) -> bytes | None:
        """The next message to send, or None when the Envoy has, or is being told of, all there is.

        The cluster and the listener that every Envoy has come first: they decide of which class it is. Those
        of groups follow, each listener after its cluster.
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
        """The version of the latest snapshot that was acknowledged as a whole; empty: none on this stream."""
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
        """The version of the snapshot that is meant for this Envoy now."""
        snapshot = snapshots.get(self._profile)
        return snapshot.version if snapshot is not None else ""

    def eds_acked(self, snapshots: SnapshotCache) -> bool:
        """Whether the Envoy routes by the endpoints that were published last, or by none at all.

        With the module it has to have acknowledged the latest live configuration, too.
        """
        snapshot, endpoints = snapshots.get(self._profile), self._subscriptions.get(ENDPOINTS)
        if snapshot is None:
            return False  # nothing was published yet, and what it routes by is from before
        if endpoints is None:
            clusters = self._subscriptions.get(CLUSTER)
            return (
                clusters is None or not clusters.has_resources
            )  # an Envoy that is back has not asked for all yet
        live = self._subscriptions.get(LIVE_CONFIG)
        is_synced: bool = endpoints.is_synced(self._published(ENDPOINTS, snapshot)) and (
            live is None or live.is_synced(self._published(LIVE_CONFIG, snapshot))
        )
        return is_synced

    def stale_resources(self, snapshots: SnapshotCache) -> tuple[str, ...]:
        """What the Envoy goes on running in another form than new Envoys get."""
        snapshot = snapshots.get(self._profile)
        if snapshot is None:
            return ()
        return tuple(
            kind.display_name
            for kind, subscription in self._subscriptions_in_order(PUSH_ORDER)
            if subscription.is_stale(snapshot.collections[kind])
        )

    def active_filter(self, snapshots: SnapshotCache) -> str:
        """The MySQL filter that the Envoy runs, as far as its listener tells; else the one it is to get."""
        listener = self._subscriptions.get(LISTENER)
        if listener is not None and listener.has_resources:
            for envoy_class in map(self._in_own_location, PROFILES):
                snapshot = snapshots.get(envoy_class)
                listeners = snapshot.collections[LISTENER] if snapshot is not None else None
                if listeners and any(
                    listener.has_resource(each, listeners) for each in listeners.resources.values()
                ):
                    return envoy_class.filter
        return self._profile.filter

    def problem(self, snapshots: SnapshotCache) -> str:
        """Why the Envoy serves nobody, or without what it should have, as a sentence; empty: all is well."""
        snapshot, listener = snapshots.get(self._profile), self._subscriptions.get(LISTENER)
        why = self._module_problem()
        if snapshot is not None and snapshot.missing_group:
            what = "what it has leads nowhere" if self._has_listener else "it gets nothing"
            return f"{what}, because no group of the settings has the name {snapshot.missing_group}"
        if snapshot is not None and listener is not None and snapshot.tls_requirement:
            if listener.has_resources and self.stale_resources(snapshots):
                return (
                    f"it serves on with older settings, although {snapshot.tls_requirement}; start that Envoy again"
                    + (f", but first see to this: {why}" if why else "")
                )
            if not listener.has_resources and self._is_listener_withheld(snapshot):
                return f"it gets no listener, because {snapshot.tls_requirement} and {why}"
        # Nobody misses a module that an Envoy does not claim to have.
        return (
            why
            if self.envoy_node.capabilities.module_version
            or self._in_own_location(MODULE_PROFILE) in self._rejected_profiles
            else ""
        )

    def _subscriptions_in_order(self, kinds: Iterable[ResourceType]) -> Iterator[tuple[ResourceType, Any]]:
        return ((kind, self._subscriptions[kind]) for kind in kinds if kind in self._subscriptions)

    def _handle(self, request: Any) -> StreamNack | None:
        kind = RESOURCE_TYPES_BY_URL.get(request.type_url)
        if kind is None:
            return None  # a type that we publish nothing of; silence leaves the Envoy as it is
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
        """Try a refused class again when a reload has changed what was refused, and nobody is served yet."""
        if not self._rejected_profiles or self._has_listener:
            return
        self._rejected_profiles = {
            envoy_class: (kind, version)
            for envoy_class, (kind, version) in self._rejected_profiles.items()
            if (snapshot := snapshots.get(envoy_class))
            and snapshot.collections[kind].subset_by_version(version)
        }
        self._profile = self._best_profile(self._filter_setting)

    def _best_profile(self, filter_setting: FilterSetting) -> EnvoyProfile:
        """The best class that the Envoy has not refused; the simplest is tried again whatever it says."""
        profiles = [
            self._in_own_location(each)
            for each in candidate_profiles(filter_setting, self.envoy_node.capabilities)
        ]
        return next((each for each in profiles if each not in self._rejected_profiles), profiles[-1])

    def _in_own_location(self, profile: EnvoyProfile) -> EnvoyProfile:
        return profile.for_group_and_zone(self.envoy_node.group, self.envoy_node.zone)

    def _published(self, kind: ResourceType, snapshot: Snapshot) -> ResourceSet:
        """All that there is of one type for this Envoy."""
        if kind is ENDPOINTS and ENDPOINTS in self._subscriptions:
            return snapshot.endpoints(self._subscriptions[ENDPOINTS].subscribed_names)
        return snapshot.collections[kind]

    def _allowed_names(self, kind: ResourceType, snapshot: Snapshot) -> frozenset[str] | None:
        """Names of what the Envoy may be given beside what it has; None: all there are."""
        if not kind.immutable:
            return None
        if not self._has_listener:
            return frozenset((CLUSTER_NAME, LISTENER_NAME))
        clusters, cluster_subscription = snapshot.collections[CLUSTER], self._subscriptions.get(CLUSTER)
        if kind is CLUSTER or cluster_subscription is None:
            return None
        held_clusters = {
            name
            for name, each in clusters.resources.items()
            if cluster_subscription.has_resource(each, clusters)
        }
        return frozenset(
            name
            for name in snapshot.collections[LISTENER].resources
            if cluster_name_for(name) in held_clusters
        )

    def _module_problem(self) -> str:
        """Why the Envoy is not of the class `module`, as a clause; empty: it is, or nobody wants it to be."""
        if self._profile.has_module or self._filter_setting in ("contrib", "none"):
            return ""
        if self._in_own_location(MODULE_PROFILE) in self._rejected_profiles:
            return "it refused Tidevoy's module (see what it refused last)"
        return module_problem(self.envoy_node.capabilities)

    def _is_listener_withheld(self, snapshot: Snapshot) -> bool:
        """Whether a demand of the settings leaves the Envoy's class without a listener."""
        return bool(snapshot.tls_requirement) and not snapshot.collections[LISTENER].resources

    @property
    def _has_listener(self) -> bool:
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and listener.has_resources

    @property
    def _is_confirmed_empty(self) -> bool:
        """An Envoy that came back may hold a listener until it has asked for listeners, and so told us."""
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and not listener.has_resources and not listener.ack_pending

    def _is_cluster_missing(self, snapshot: Snapshot) -> bool:
        """Whether a first listener would lead to a cluster of another class, or to one that is refused."""
        clusters = self._subscriptions.get(CLUSTER)
        if clusters is None or self._has_listener:
            return False
        offered = snapshot.collections[CLUSTER]
        first = offered.resources.get(CLUSTER_NAME)
        return first is None or not clusters.has_resource(first, offered)

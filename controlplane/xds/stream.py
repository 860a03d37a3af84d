"""One Envoy's stream: its subscriptions, in the order in which they may be served. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.discovery_request import BadRequest, Introduction, parse_delta, parse_sotw
from controlplane.xds.resource_set import Collection
from controlplane.xds.resource_type import (
    BY_URL,
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    LIVE_CONFIG,
    PUSH_ORDER,
    ResourceType,
)
from controlplane.xds.resources.listeners_and_clusters import LISTENER_NAME, cluster_of
from controlplane.xds.resources.profile import CLASSES, MODULE, EnvoyClass, Filter, candidates, lacks_module
from controlplane.xds.snapshot_cache import Snapshot, Snapshots
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the two forms of the protocol: how its requests are read and its subscriptions kept."""

    parse: Callable[[bytes], Any]
    subscription: Callable[[ResourceType], Any]


SOTW = Dialect(parse_sotw, SotwSubscription)
DELTA = Dialect(parse_delta, DeltaSubscription)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A NACK. `fell_back_to` is the class that is tried instead, while the Envoy has no listener."""

    kind: ResourceType
    version: str
    message: str
    fell_back_to: EnvoyClass | None = None


class Stream:
    """What one Envoy has and lacks. `feed` its messages; `next` gives what to send."""

    def __init__(
        self,
        dialect: Dialect,
        address: str,
        first: bytes,
        wanted: Filter,
        *,
        certificate_until: float | None = None,
    ) -> None:
        """`first` is the stream's first message, `address` the Envoy's, `wanted` the setting. BadRequest.

        `certificate_until` is when the certificate ends that the Envoy has shown; None: it showed none.
        """
        request = dialect.parse(first)
        if request.introduction is None or not request.introduction.id:
            raise BadRequest("it names no node.id; give every Envoy one of its own (--service-node)")
        self.introduction: Introduction = request.introduction
        self.address = address
        self.certificate_until = certificate_until
        self._dialect = dialect
        self._subscriptions: dict[ResourceType, Any] = {}
        self._refused: dict[EnvoyClass, tuple[ResourceType, str]] = {}  # and which version of what it was
        self._class = self._best(wanted)
        self._wanted = wanted
        self._acked_version = ""
        self._take(request)

    def choose(self, wanted: Filter) -> None:
        """Take over a changed setting of the filter; it reaches only an Envoy that has no listener yet."""
        self._wanted, self._class = wanted, self._best(wanted)

    def feed(self, data: bytes) -> Refusal | None:
        """Take in a message; the refusal, if it is one. BadRequest."""
        return self._take(self._dialect.parse(data))

    @property
    def envoy_class(self) -> EnvoyClass:
        """The class whose snapshots are for this Envoy now."""
        return self._class

    def next(self, snapshots: Snapshots) -> bytes | None:
        """The next message to send, or None when the Envoy has, or is being told of, all there is.

        The cluster and the listener that every Envoy has come first: they decide of which class it is. Those
        of groups follow, each listener after its cluster.
        """
        self._forgive(snapshots)
        snapshot = snapshots.get(self._class)
        if snapshot is None:
            return None
        for kind, subscription in self._in_order(PUSH_ORDER):
            if kind is LISTENER and self._lacks_cluster(snapshot):
                continue
            anew = kind is CLUSTER and self._has_surely_no_session
            offered, ready = self._offered(kind, snapshot), self._ready(kind, snapshot)
            message: bytes | None = subscription.offer(offered, anew=anew, ready=ready)
            if message is not None:
                if kind is CLUSTER and ENDPOINTS in self._subscriptions:
                    self._subscriptions[ENDPOINTS].resend()
                return message
        for kind, subscription in self._in_order(reversed(PUSH_ORDER)):
            message = subscription.withdraw(self._offered(kind, snapshot))
            if message is not None:
                return message
        return None

    def acked_version(self, snapshots: Snapshots) -> str:
        """The version of the latest snapshot that was acknowledged as a whole; empty: none on this stream."""
        snapshot = snapshots.get(self._class)
        if (
            snapshot is not None
            and not snapshot.absent
            and not self._forbidden(snapshot)
            and all(
                subscription.settled(self._offered(kind, snapshot))
                for kind, subscription in self._subscriptions.items()
            )
        ):
            self._acked_version = snapshot.version
        return self._acked_version

    def published_version(self, snapshots: Snapshots) -> str:
        """The version of the snapshot that is meant for this Envoy now."""
        snapshot = snapshots.get(self._class)
        return snapshot.version if snapshot is not None else ""

    def endpoints_acked(self, snapshots: Snapshots) -> bool:
        """Whether the Envoy routes by the endpoints that were published last, or by none at all.

        With the module it has to have acknowledged the latest live configuration, too.
        """
        snapshot, endpoints = snapshots.get(self._class), self._subscriptions.get(ENDPOINTS)
        if snapshot is None:
            return False  # nothing was published yet, and what it routes by is from before
        if endpoints is None:
            clusters = self._subscriptions.get(CLUSTER)
            return clusters is None or not clusters.holds  # an Envoy that is back has not asked for all yet
        live = self._subscriptions.get(LIVE_CONFIG)
        settled: bool = endpoints.settled(self._offered(ENDPOINTS, snapshot)) and (
            live is None or live.settled(self._offered(LIVE_CONFIG, snapshot))
        )
        return settled

    def outdated(self, snapshots: Snapshots) -> tuple[str, ...]:
        """What the Envoy goes on running in another form than new Envoys get."""
        snapshot = snapshots.get(self._class)
        if snapshot is None:
            return ()
        return tuple(
            kind.noun
            for kind, subscription in self._in_order(PUSH_ORDER)
            if subscription.outdated(snapshot.collections[kind])
        )

    def filter(self, snapshots: Snapshots) -> str:
        """The MySQL filter that the Envoy runs, as far as its listener tells; else the one it is to get."""
        listener = self._subscriptions.get(LISTENER)
        if listener is not None and listener.holds:
            for envoy_class in map(self._here, CLASSES):
                snapshot = snapshots.get(envoy_class)
                listeners = snapshot.collections[LISTENER] if snapshot is not None else None
                if listeners and any(listener.has(each, listeners) for each in listeners.resources.values()):
                    return envoy_class.filter
        return self._class.filter

    def problem(self, snapshots: Snapshots) -> str:
        """Why the Envoy serves nobody, or without what it should have, as a sentence; empty: all is well."""
        snapshot, listener = snapshots.get(self._class), self._subscriptions.get(LISTENER)
        why = self._why_no_module()
        if snapshot is not None and snapshot.absent:
            what = "what it has leads nowhere" if self._has_listener else "it gets nothing"
            return f"{what}, because no group of the settings has the name {snapshot.absent}"
        if snapshot is not None and listener is not None and snapshot.demand:
            if listener.holds and self.outdated(snapshots):
                return (
                    f"it serves on with older settings, although {snapshot.demand}; start that Envoy again"
                    + (f", but first see to this: {why}" if why else "")
                )
            if not listener.holds and self._forbidden(snapshot):
                return f"it gets no listener, because {snapshot.demand} and {why}"
        # Nobody misses a module that an Envoy does not claim to have.
        return why if self.introduction.build.module or self._here(MODULE) in self._refused else ""

    def _in_order(self, kinds: Iterable[ResourceType]) -> Iterator[tuple[ResourceType, Any]]:
        return ((kind, self._subscriptions[kind]) for kind in kinds if kind in self._subscriptions)

    def _take(self, request: Any) -> Refusal | None:
        kind = BY_URL.get(request.type_url)
        if kind is None:
            return None  # a type that we publish nothing of; silence leaves the Envoy as it is
        subscription = self._subscriptions.get(kind)
        if subscription is None:
            subscription = self._subscriptions[kind] = self._dialect.subscription(kind)
        answer = subscription.receive(request)
        if answer is None or not answer.refusal:
            return None
        instead = None
        if kind.sticky and not self._has_listener:
            self._refused[self._class] = (kind, answer.version)
            best = self._best(self._wanted)
            instead = best if best != self._class else None
            self._class = best
        return Refusal(kind, answer.version, answer.refusal, instead)

    def _forgive(self, snapshots: Snapshots) -> None:
        """Try a refused class again when a reload has changed what was refused, and nobody is served yet."""
        if not self._refused or self._has_listener:
            return
        self._refused = {
            envoy_class: (kind, version)
            for envoy_class, (kind, version) in self._refused.items()
            if (snapshot := snapshots.get(envoy_class)) and snapshot.collections[kind].part(version)
        }
        self._class = self._best(self._wanted)

    def _best(self, wanted: Filter) -> EnvoyClass:
        """The best class that the Envoy has not refused; the simplest is tried again whatever it says."""
        able = [self._here(each) for each in candidates(wanted, self.introduction.build)]
        return next((each for each in able if each not in self._refused), able[-1])

    def _here(self, envoy_class: EnvoyClass) -> EnvoyClass:
        return envoy_class.at(self.introduction.group, self.introduction.zone)

    def _offered(self, kind: ResourceType, snapshot: Snapshot) -> Collection:
        """All that there is of one type for this Envoy."""
        if kind is ENDPOINTS and ENDPOINTS in self._subscriptions:
            return snapshot.endpoints(self._subscriptions[ENDPOINTS].names)
        return snapshot.collections[kind]

    def _ready(self, kind: ResourceType, snapshot: Snapshot) -> frozenset[str] | None:
        """Names of what the Envoy may be given beside what it has; None: all there are."""
        if not kind.sticky:
            return None
        if not self._has_listener:
            return frozenset((CLUSTER_NAME, LISTENER_NAME))
        clusters, held = snapshot.collections[CLUSTER], self._subscriptions.get(CLUSTER)
        if kind is CLUSTER or held is None:
            return None
        there = {name for name, each in clusters.resources.items() if held.has(each, clusters)}
        return frozenset(
            name for name in snapshot.collections[LISTENER].resources if cluster_of(name) in there
        )

    def _why_no_module(self) -> str:
        """Why the Envoy is not of the class `module`, as a clause; empty: it is, or nobody wants it to be."""
        if self._class.has_module or self._wanted in ("contrib", "none"):
            return ""
        if self._here(MODULE) in self._refused:
            return "it refused Tidevoy's module (see what it refused last)"
        return lacks_module(self.introduction.build)

    def _forbidden(self, snapshot: Snapshot) -> bool:
        """Whether a demand of the settings leaves the Envoy's class without a listener."""
        return bool(snapshot.demand) and not snapshot.collections[LISTENER].resources

    @property
    def _has_listener(self) -> bool:
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and listener.holds

    @property
    def _has_surely_no_session(self) -> bool:
        """An Envoy that came back may hold a listener until it has asked for listeners, and so told us."""
        listener = self._subscriptions.get(LISTENER)
        return listener is not None and not listener.holds and not listener.awaiting

    def _lacks_cluster(self, snapshot: Snapshot) -> bool:
        """Whether a first listener would lead to a cluster of another class, or to one that is refused."""
        clusters = self._subscriptions.get(CLUSTER)
        if clusters is None or self._has_listener:
            return False
        offered = snapshot.collections[CLUSTER]
        first = offered.resources.get(CLUSTER_NAME)
        return first is None or not clusters.has(first, offered)

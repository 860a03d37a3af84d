"""The gRPC server that Envoys connect to: aggregated discovery (ADS), state of the world and delta.

Messages are bytes here: `stream` parses requests and joins responses from encoded parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import grpc
import structlog

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import ConfigError
from controlplane.events.event_log import EventLog
from controlplane.grpc_auth import XdsPortService
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.plan import Plan, Stamp
from controlplane.observe.fact_store import FactStore
from controlplane.xds.client_identity import ClientIdentityChecker, certificate_expiry, peer_address
from controlplane.xds.discovery_request import BadRequest
from controlplane.xds.envoy_registry import EnvoyRegistry
from controlplane.xds.resources.profile import EnvoyProfile
from controlplane.xds.server_certificates import ServerCertificates
from controlplane.xds.snapshot_cache import SnapshotCache, StaticResources
from controlplane.xds.stream import Stream
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription, Subscription

log = structlog.get_logger("tidevoy.xds")

_ADS_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"

_SERVER_OPTIONS = (
    # If 1, two control planes could open one port, and the kernel would divide the Envoys among them.
    ("grpc.so_reuseport", 0),
    # A dead Envoy is detected after 15 s by a missing ping response. Envoys may send pings at any rate.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # grpcio 1.85 ignores keepalive_timeout_ms
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
)


QUIET_SECONDS = 0.020  # a burst of changes is pushed after this many seconds without a change
MAX_DELAY_SECONDS = 0.200  # a change is pushed at the latest after this many seconds
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 5.0  # backoff after failed pushes


class XdsServer:
    """Publishes plans to all connected Envoys. All methods run on one event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        events: EventLog,
        facts: FactStore,
        services: Sequence[XdsPortService] = (),
    ) -> None:
        """`facts` is notified of requests and acknowledgements. `services` are served on the same port."""
        self.port = 0
        self.stamp: Stamp | None = None
        """Stamp of the pushed plan; None before the first push, and for a plan without a stamp."""
        self.statuses_changed = asyncio.Event()
        """Set when `statuses` or `stamp` may have changed; its only reader clears it."""
        self._settings = settings
        self._services = services
        self._clock = clock
        self._events = events
        self._facts = facts
        self._identity_checker = ClientIdentityChecker(settings.xds.tls, clock, events.emit)
        self._registry = EnvoyRegistry(clock, events.emit)
        self._plan: Plan | None = None
        self._plan_stamp: Stamp | None = None
        self._static_resources = StaticResources(settings)
        self._snapshots = SnapshotCache()
        self._pushed_versions: dict[EnvoyProfile, str] = {}
        self._wake_events: set[asyncio.Event] = set()
        self._server: grpc.aio.Server | None = None
        self._certificates: ServerCertificates | None = None
        # All times are of the event loop's clock.
        self._push_due = asyncio.Event()  # set while a change is not pushed yet
        self._first_change = self._latest_change = 0.0  # times of the changes that are not pushed yet
        self._last_push = self._retry_at = float("-inf")
        self._retry_seconds = 0.0  # backoff; 0 if the latest push succeeded

    async def start(self) -> None:
        """Open the port. Raises ConfigError if it cannot be opened or its certificate is unusable."""
        xds = self._settings.xds
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._handlers(),))
        for service in self._services:
            service.register(server, self._identity_checker.authorize)
        try:
            if xds.tls is None:
                self.port = server.add_insecure_port(xds.listen)
            else:
                self._certificates = await asyncio.to_thread(
                    ServerCertificates, xds.tls, self._clock, self._events.emit
                )
                self.port = server.add_secure_port(xds.listen, self._certificates.credentials())
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                "settings",
                "xds.listen",
                f"{xds.listen} cannot be opened ({error})",
                "choose an address of this machine with a free port and, with TLS, a valid certificate",
            ) from error
        self._server = server
        # If gRPC's start or stop were cancelled, a task and an open port would remain.
        await run_to_completion(server.start())

    async def run(self) -> None:
        """Push deferred changes, and reload the certificates, until cancelled. Call `start` first."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._push_when_due())
            if self._certificates is not None:
                tasks.create_task(self._certificates.watch())

    async def stop(self) -> None:
        """Close the port and all streams; Envoys keep their resources and reconnect."""
        if self._server is not None:
            await run_to_completion(self._server.stop(None))
            self._server = None

    def publish(self, plan: Plan, *, at_once: bool = False, stamp: Stamp | None = None) -> None:
        """Publish this plan to all Envoys, `at_once` or together with other changes of the same burst."""
        self._plan, self._plan_stamp = plan, stamp
        self._request_push(at_once=at_once)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings. Clusters and listeners that Envoys already have do not change."""
        self._settings = settings
        self._static_resources = StaticResources(settings, previous=self._static_resources)
        self._identity_checker.configure(settings.xds.tls)
        self._registry.set_filter(settings.xds.filter)
        if self._plan is not None:
            self._request_push()

    @property
    def is_pushed(self) -> bool:
        """Whether the latest plan is pushed to Envoys."""
        return not self._push_due.is_set()

    def statuses(self) -> list[EnvoyStatus]:
        """Return the Envoys that are connected, or were in the last ten minutes, sorted by id."""
        return self._registry.statuses(self._snapshots)

    def _request_push(self, *, at_once: bool = False) -> None:
        now = self._latest_change = asyncio.get_running_loop().time()
        if not self._push_due.is_set():
            self._first_change = now
            self._push_due.set()
        if at_once or self._next_push_at() <= now:
            self._push()

    async def _push_when_due(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._push_due.wait()
            if not self._push_due.is_set():
                continue  # another task has pushed
            if (delay := self._next_push_at() - loop.time()) > 0:
                # Do not sleep until a retry, because a push `at_once` may succeed before and end the backoff.
                await asyncio.sleep(min(delay, MAX_DELAY_SECONDS))
            else:
                self._push()

    def _next_push_at(self) -> float:
        return max(next_push_at(self._last_push, self._first_change, self._latest_change), self._retry_at)

    def _push(self) -> None:
        """Replace the snapshots of all streams. If this fails, the old snapshots stay and `run` retries."""
        loop = asyncio.get_running_loop()
        try:
            snapshots = SnapshotCache(self._plan, self._static_resources)
            versions = {profile: snapshots[profile].version for profile in self._registry.profiles(snapshots)}
        except Exception as error:
            if not self._retry_seconds:
                log.exception("could not build the resources of the latest plan")
                self._events.emit(
                    "xds.push_failed",
                    "xds",
                    f"Envoys keep the previous resources, because those of the latest plan cannot be built"
                    f" ({error!r}); the control plane retries",
                )
            self._retry_seconds = min(max(2 * self._retry_seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
            self._retry_at = loop.time() + self._retry_seconds
            return
        if self._retry_seconds:
            self._retry_seconds, self._retry_at = 0.0, float("-inf")
            self._events.emit(
                "xds.push_recovered", "xds", "Envoys get the resources of the latest plan again"
            )
        self._snapshots, self.stamp = snapshots, self._plan_stamp
        self._push_due.clear()
        # Many plans change no resource. If their push counted, it would delay the next real change.
        if versions.items() - self._pushed_versions.items():
            self._last_push = loop.time()
        self._pushed_versions = versions
        for wake in self._wake_events:
            wake.set()
        self.statuses_changed.set()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # gRPC passes bytes, because the handlers have no serialisers.
        methods = {
            "StreamAggregatedResources": partial(self._serve, SotwSubscription),
            "DeltaAggregatedResources": partial(self._serve, DeltaSubscription),
        }
        handlers = {name: grpc.stream_stream_rpc_method_handler(serve) for name, serve in methods.items()}
        return grpc.method_handlers_generic_handler(_ADS_SERVICE, handlers)

    async def _serve(self, variant: type[Subscription], _: object, context: grpc.aio.ServicerContext) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        try:
            stream = Stream(
                variant,
                peer_address(context.peer()),
                first,
                self._settings.xds.filter,
                certificate_until=certificate_expiry(context.auth_context()),
            )
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._identity_checker.authorize(context, stream.envoy_node.id)
        self._registry.add_stream(stream)
        self.statuses_changed.set()
        wake, ended = asyncio.Event(), asyncio.Event()
        wake.set()
        self._wake_events.add(wake)
        problem = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(stream, context, wake, ended))
                try:
                    await self._read(stream, context, wake)
                except BadRequest as error:
                    problem = str(error)
                # The writer is not cancelled: gRPC cannot end a call while a write is pending.
                ended.set()
                wake.set()
        finally:
            self._wake_events.discard(wake)
            self._registry.remove_stream(stream)
            self.statuses_changed.set()
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def _read(self, stream: Stream, context: grpc.aio.ServicerContext, wake: asyncio.Event) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            stream_nack = stream.receive(data)
            # Let the stream store the acknowledged version before the next push replaces the snapshots.
            stream.acked_version(self._snapshots)
            if stream_nack is not None:
                self._registry.record_nack(stream, stream_nack)
            wake.set()
            self._facts.notify_acks_changed()
            self.statuses_changed.set()

    async def _write(
        self, stream: Stream, context: grpc.aio.ServicerContext, wake: asyncio.Event, ended: asyncio.Event
    ) -> None:
        """Send what is published, when `wake` is set. End when `ended` is set too."""
        while True:
            await wake.wait()
            wake.clear()
            # A write waits until the Envoy reads, so the next message may be from a newer snapshot.
            while not ended.is_set() and (message := stream.next_message(self._snapshots)) is not None:
                await context.write(message)
            if ended.is_set():
                return
            self._registry.check_problem(stream, self._snapshots)
            self.statuses_changed.set()


def next_push_at(last_push: float, first: float, latest: float) -> float:
    """Return when to push the pending changes: at once after a quiet period, else at the end of the burst.

    `last_push` is the time of the last push (minus infinity: never). `first` and `latest` are the times of
    the first and the latest pending change.
    """
    if first - last_push >= QUIET_SECONDS:
        return first
    return min(latest + QUIET_SECONDS, first + MAX_DELAY_SECONDS)

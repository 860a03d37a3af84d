"""The gRPC server that Envoys connect to: aggregated discovery (ADS) in both protocol variants.

Messages pass this file as bytes: requests are parsed in `stream`, and responses are joined from parts that
all streams share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import ConfigError
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.plan import Plan, Stamp
from controlplane.xds.client_identity import ClientIdentityChecker, certificate_expiry, peer_address
from controlplane.xds.debounce import next_push_at
from controlplane.xds.discovery_request import BadRequest
from controlplane.xds.envoy_registry import EnvoyRegistry
from controlplane.xds.server_certificates import ServerCertificates
from controlplane.xds.snapshot_cache import SnapshotCache, StaticResources
from controlplane.xds.stream import DELTA, SOTW, Stream, XdsVariant

_ADS_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"

_SERVER_OPTIONS = (
    # Two control planes on one port would share the Envoys at random: the second must fail to start.
    ("grpc.so_reuseport", 0),
    # A dead Envoy is detected after 15 s, and an Envoy may send keepalive pings as often.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # grpcio 1.85 ignores keepalive_timeout_ms
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
)


class XdsServer:
    """Publishes plans to all connected Envoys. All methods run on one event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        on_event: Callable[[str, str, str], None],
        on_request: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        services: Sequence[Callable[[grpc.aio.Server, AuthorizeEnvoy], None]] = (),
    ) -> None:
        """`on_event` gets kind, subject and message of an event.

        `on_request` is called when an Envoy sends a request or ACK; `on_change`, when `statuses` or `stamp`
        may have changed. `services` add themselves to the same port and get the function that authorizes
        Envoys.
        """
        self.port = 0
        self._settings = settings
        self._services = services
        self._clock = clock
        self._on_event = on_event
        self._identity_checker = ClientIdentityChecker(settings.xds.tls, clock, on_event)
        self._registry = EnvoyRegistry(clock, on_event)
        self._on_request = on_request
        self._on_change = on_change
        self._plan: Plan | None = None
        self._plan_stamp: Stamp | None = None
        self.stamp: Stamp | None = None
        """Stamp of the plan that is pushed to Envoys; None: no plan, or one without a stamp."""
        self._static_resources = StaticResources(settings)
        self._snapshots = SnapshotCache()
        self._wake_events: set[asyncio.Event] = set()
        self._server: grpc.aio.Server | None = None
        self._certificate_watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_push = float("-inf")
        self._first_change: float | None = None  # time of the first change that is not pushed yet

    async def start(self) -> None:
        """Open the port. Raises ConfigError if it cannot be opened or its certificate is unusable."""
        xds = self._settings.xds
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._handlers(),))
        for add_service in self._services:
            add_service(server, self._identity_checker.authorize)
        certificates = None
        try:
            if xds.tls is None:
                self.port = server.add_insecure_port(xds.listen)
            else:
                certificates = await asyncio.to_thread(
                    ServerCertificates, xds.tls, self._clock, self._on_event
                )
                self.port = server.add_secure_port(xds.listen, certificates.credentials())
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                "settings",
                "xds.listen",
                f"{xds.listen} cannot be opened ({error})",
                "choose an address of this machine with a free port and, with TLS, a valid certificate",
            ) from error
        self._server = server
        # gRPC's start and stop leave a task and an open port behind if they are cancelled half way.
        await run_to_completion(server.start())
        if certificates is not None:
            self._certificate_watch = asyncio.create_task(certificates.watch())

    async def stop(self) -> None:
        """Close the port and all streams; Envoys keep their resources and reconnect."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._certificate_watch is not None:
            self._certificate_watch.cancel()
            await asyncio.wait([self._certificate_watch])
            self._certificate_watch = None
        if self._server is not None:
            await run_to_completion(self._server.stop(None))
            self._server = None

    def publish(self, plan: Plan, *, at_once: bool = False, stamp: Stamp | None = None) -> None:
        """Publish this plan to all Envoys, `at_once` or together with changes that follow shortly."""
        self._plan, self._plan_stamp = plan, stamp
        if at_once:
            self._push()
        else:
            self._schedule_push()

    def configure(self, settings: Settings) -> None:
        """Apply changed settings. Clusters and listeners that Envoys already hold do not change."""
        self._settings, self._static_resources = settings, StaticResources(settings)
        self._identity_checker.configure(settings.xds.tls)
        self._registry.set_filter(settings.xds.filter)
        self._schedule_push()

    @property
    def is_pushed(self) -> bool:
        """Whether the latest plan is pushed to Envoys, not waiting for the end of a burst."""
        return self._first_change is None

    def statuses(self) -> list[EnvoyStatus]:
        """Return every Envoy that is connected or was in the last ten minutes, by id."""
        return self._registry.statuses(self._snapshots)

    def _schedule_push(self) -> None:
        if self._plan is None:
            return
        now = asyncio.get_running_loop().time()
        self._first_change = now if self._first_change is None else self._first_change
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = next_push_at(self._last_push, self._first_change, now)
        if at <= now:
            self._push()
        else:
            self._timer = asyncio.get_running_loop().call_at(at, self._push)

    def _push(self) -> None:
        assert self._plan is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._first_change = None
        self.stamp = self._plan_stamp
        previous, self._snapshots = self._snapshots, SnapshotCache(self._plan, self._static_resources)
        # Many plans make no difference to Envoys; one of those must not delay the next real change.
        if any(
            previous.get(profile) != self._snapshots.get(profile) for profile in self._registry.profiles()
        ):
            self._last_push = asyncio.get_running_loop().time()
        for wake in self._wake_events:
            wake.set()
        self._on_change()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Without serialisers, gRPC passes the bytes unchanged.
        methods = {
            "StreamAggregatedResources": grpc.stream_stream_rpc_method_handler(partial(self._serve, SOTW)),
            "DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(partial(self._serve, DELTA)),
        }
        return grpc.method_handlers_generic_handler(_ADS_SERVICE, methods)

    async def _serve(self, variant: XdsVariant, _: object, context: grpc.aio.ServicerContext) -> None:
        """Serve one stream from its first message to its end."""
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
        self._on_change()
        wake = asyncio.Event()
        wake.set()
        self._wake_events.add(wake)
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(stream, context, wake))
                await self._read(stream, context, wake)
                writer.cancel()
        except* BadRequest as group:
            problem = str(group.exceptions[0])
        else:
            problem = ""
        finally:
            self._wake_events.discard(wake)
            self._registry.remove_stream(stream)
            self._on_change()
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def _read(self, stream: Stream, context: grpc.aio.ServicerContext, wake: asyncio.Event) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            stream_nack = stream.receive(data)
            stream.acked_version(self._snapshots)  # updates it now, before the next push
            if stream_nack is not None:
                self._registry.record_nack(stream, stream_nack)
            wake.set()
            self._on_request()
            self._on_change()

    async def _write(self, stream: Stream, context: grpc.aio.ServicerContext, wake: asyncio.Event) -> None:
        while True:
            await wake.wait()
            wake.clear()
            # A write waits for the Envoy to read; the next message carries what is published by then.
            while (message := stream.next_message(self._snapshots)) is not None:
                await context.write(message)
            self._registry.check_problem(stream, self._snapshots)
            self._on_change()

"""The gRPC service that reports our Envoys to other replicas: `tidevoy.Replicas/Follow` on the xDS port."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import grpc
import structlog

from controlplane.aio import wait_at_most
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.replicas import peer_feed_pb2, peer_messages
from controlplane.replicas.merged_fleet import ReplicaFleet
from controlplane.replicas.peer_authorization import abort_unless_replica

log = structlog.get_logger("tidevoy.replicas")

FOLLOW_METHOD = "Follow"
SERVICE_NAME = "tidevoy.Replicas"
_SHARED_EVENT_PREFIXES = ("envoy.", "audit.")  # every replica detects other events itself

_HEARTBEAT_SECONDS = 1.0  # the fleet is sent at least this often, so that followers know that we are alive
# Pause after a fleet message: at least this minimum, and at least this multiple of the time the message took.
_MIN_FLEET_INTERVAL_SECONDS, _FLEET_PAUSE_FACTOR = 0.05, 10.0
_MAX_QUEUED_BYTES = 64 * 1024 * 1024  # a subscriber that is this far behind has stopped reading
_MAX_BATCH_BYTES = 512 * 1024  # the rest goes into the next batch
_MESSAGE_OVERHEAD_BYTES = 128  # memory cost of a queued message beyond its payload


class PeerFeed:
    """Sends each subscriber every message that is added after the start of its subscription."""

    def __init__(self, settings: Settings, clock: Clock, own_fleet: Callable[[], ReplicaFleet]) -> None:
        """`own_fleet` returns the Envoys of this replica."""
        self._settings = settings
        self._clock = clock
        self._own_fleet = own_fleet
        self.peer_addresses: Collection[str] = ()  # advertised by the other replicas, which may subscribe
        self._subscribers: set[_Subscriber] = set()
        self._fleet_changed = asyncio.Event()

    def register(self, server: grpc.aio.Server, _: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started. Replicas need no Envoy authorization."""
        handler = grpc.unary_stream_rpc_method_handler(
            self._serve_subscriber, request_deserializer=peer_feed_pb2.FollowRequest.FromString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {FOLLOW_METHOD: handler}),)
        )

    async def run(self) -> None:
        """Send the fleet after changes and as a heartbeat, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await wait_at_most(self._fleet_changed, _HEARTBEAT_SECONDS)
            self._fleet_changed.clear()
            start = loop.time()
            if self._subscribers:
                fleet = self._fleet_message()
                for subscriber in self._subscribers:
                    subscriber.put_fleet(fleet)
            await asyncio.sleep(max(_MIN_FLEET_INTERVAL_SECONDS, _FLEET_PAUSE_FACTOR * (loop.time() - start)))

    def notify_fleet_changed(self) -> None:
        """Request a fleet message: our own Envoys have changed."""
        self._fleet_changed.set()

    # --- sending; the reports of Envoys are forwarded unchanged (see `ReportForwarder`) ---

    def forward_load_report(self, envoy: str, at: float, report: bytes) -> None:
        self._send(at, load_report=peer_feed_pb2.LoadReport(envoy=envoy, report=report))

    def forward_telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        self._send(
            at, telemetry=peer_feed_pb2.Telemetry(stream=number, envoy=envoy, message=data, first=first)
        )

    def forward_statements(self, envoy: str, at: float, report: bytes) -> None:
        self._send(at, statements=peer_feed_pb2.StatementReport(envoy=envoy, report=report))

    def forward_telemetry_end(self, number: int) -> None:
        self._send(self._clock(), telemetry_ended=number)

    def send_event(self, kind: str, subject: str, message: str, data: Mapping[str, Any]) -> None:
        """Send an event if other replicas cannot observe events of its kind themselves."""
        if kind.startswith(_SHARED_EVENT_PREFIXES):
            self._put(peer_messages.encode_event(kind, subject, message, data, self._clock()))

    def _send(self, at: float, **content: Any) -> None:
        if self._subscribers:
            self._put(peer_messages.encode_message(at, **content))

    def _put(self, message: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.put_message(message)

    def _fleet_message(self) -> bytes:
        return peer_messages.encode_fleet(self._own_fleet(), self._clock())

    async def _serve_subscriber(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        await abort_unless_replica(context, self.peer_addresses, self._settings)
        subscriber = _Subscriber()
        subscriber.put_fleet(self._fleet_message())
        self._subscribers.add(subscriber)
        try:
            while batch := await subscriber.next_batch():
                await context.write(batch)
        finally:
            self._subscribers.discard(subscriber)
        log.warning("a replica reads its feed too slowly and must subscribe again", replica=request.name)
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "the feed was read too slowly; subscribe again"
        )


class _Subscriber:
    """The queue of messages for one subscriber."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._latest_fleet = b""  # not sent yet; a newer fleet replaces it
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._has_overflowed = False

    def put_fleet(self, message: bytes) -> None:
        self._latest_fleet = message
        self._wake.set()

    def put_message(self, message: bytes) -> None:
        if self._has_overflowed:
            return
        self._queue.append(message)
        self._queued_bytes += len(message) + _MESSAGE_OVERHEAD_BYTES
        if self._queued_bytes > _MAX_QUEUED_BYTES:
            # If metrics messages were missing, the rest would look complete, so drop the whole queue.
            self._has_overflowed = True
            self._queue.clear()
        self._wake.set()

    async def next_batch(self) -> bytes:
        """Wait for messages and return them as one batch; empty if the queue has overflowed."""
        while not (self._has_overflowed or self._latest_fleet or self._queue):
            self._wake.clear()
            await self._wake.wait()
        if self._has_overflowed:
            return b""
        messages: list[bytes] = []
        size = 0
        if self._latest_fleet:
            messages.append(self._latest_fleet)
            self._latest_fleet = b""
        while self._queue and size < _MAX_BATCH_BYTES:
            message = self._queue.popleft()
            self._queued_bytes -= len(message) + _MESSAGE_OVERHEAD_BYTES
            size += len(message)
            messages.append(message)
        batch: bytes = peer_feed_pb2.MessageBatch(messages=messages).SerializeToString()
        return batch

"""The gRPC service by which other replicas hear of our Envoys: `tidevoy.Replicas/Follow`, on the xDS port."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import structlog

from controlplane.clock import Clock
from controlplane.grpc_auth import Admit
from controlplane.replicas import peer_feed_pb2, peer_messages
from controlplane.replicas.merged_fleet import ReplicaFleet

log = structlog.get_logger("tidevoy.replicas")

METHOD = "Follow"
SERVICE = "tidevoy.Replicas"

_PULSE = 1.0  # seconds after which the fleet is told again: by that a follower knows that we live
# Seconds between two tellings of the fleet, however often it changes; or so many times as long as one takes.
_GATHER, _REST_FACTOR = 0.05, 10.0
_MOST_WAITING = 64 * 1024 * 1024  # bytes: who is that far behind has stopped reading
_BULLETIN = 512 * 1024  # bytes after which the rest goes into the next message
_OVERHEAD = 128  # bytes that a piece of news costs beside its own


class Feed:
    """Tells every follower what is given to it from when it began to follow."""

    def __init__(
        self,
        clock: Clock,
        *,
        ours: Callable[[], ReplicaFleet],
        refusal: Callable[[grpc.aio.ServicerContext], str],
    ) -> None:
        """`ours` gives our Envoys as they are. `refusal` says why a caller may not follow; empty: it may."""
        self._clock = clock
        self._ours = ours
        self._refusal = refusal
        self._followers: set[_Follower] = set()
        self._changed = asyncio.Event()

    def register(self, server: grpc.aio.Server, _: Admit) -> None:
        """Add the service to a server that has not been started yet. Who may follow is no Envoy."""
        handler = grpc.unary_stream_rpc_method_handler(
            self._follow, request_deserializer=peer_feed_pb2.FollowRequest.FromString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def run(self) -> None:
        """Tell the fleet again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PULSE):
                    await self._changed.wait()
            self._changed.clear()
            start = loop.time()
            if self._followers:
                fleet = self._fleet()
                for follower in self._followers:
                    follower.put_fleet(fleet)
            await asyncio.sleep(max(_GATHER, _REST_FACTOR * (loop.time() - start)))

    def changed(self) -> None:
        """Our own Envoys are not as they were any more."""
        self._changed.set()

    def load(self, envoy: str, at: float, report: bytes) -> None:
        """Tell a load report as it came."""
        if self._followers:
            self._tell(peer_messages.of_load(envoy, at, report))

    def telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        """Tell a message of a metrics stream as it came."""
        if self._followers:
            self._tell(peer_messages.of_telemetry(number, envoy, at, data, first=first))

    def telemetry_ended(self, number: int) -> None:
        """Tell that a metrics stream has ended."""
        if self._followers:
            self._tell(peer_messages.of_telemetry_end(number, self._clock()))

    def event(self, kind: str, subject: str, message: str, data: Mapping[str, Any]) -> None:
        """Tell an event, if it is of a kind that others cannot know of."""
        if self._followers and peer_messages.is_shared(kind):
            self._tell(peer_messages.of_event(kind, subject, message, data, self._clock()))

    def _tell(self, piece: bytes) -> None:
        for follower in self._followers:
            follower.put(piece)

    def _fleet(self) -> bytes:
        return peer_messages.of_fleet(self._ours(), self._clock())

    async def _follow(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        if refusal := self._refusal(context):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
        follower = _Follower()
        follower.put_fleet(self._fleet())
        self._followers.add(follower)
        try:
            while bulletin := await follower.next():
                await context.write(bulletin)
        finally:
            self._followers.discard(follower)
        log.warning("a replica does not read what it is told, so it has to begin anew", replica=request.name)
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "it was not read for too long; follow again from now on"
        )


class _Follower:
    """What waits for one follower."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._fleet = b""  # only the latest is told
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._is_cut_off = False

    def put_fleet(self, piece: bytes) -> None:
        self._fleet = piece
        self._wake.set()

    def put(self, piece: bytes) -> None:
        if self._is_cut_off:
            return
        self._waiting.append(piece)
        self._size += len(piece) + _OVERHEAD
        if self._size > _MOST_WAITING:
            # A part of a flush would pass for the whole of it, so nothing of what waits is told any more.
            self._is_cut_off = True
            self._waiting.clear()
        self._wake.set()

    async def next(self) -> bytes:
        """What there is to tell, when there is something. Empty: it is cut off."""
        while not (self._is_cut_off or self._fleet or self._waiting):
            self._wake.clear()
            await self._wake.wait()
        if self._is_cut_off:
            return b""
        pieces: list[bytes] = []
        size = 0
        if self._fleet:
            pieces.append(self._fleet)
            self._fleet = b""
        while self._waiting and size < _BULLETIN:
            piece = self._waiting.popleft()
            self._size -= len(piece) + _OVERHEAD
            size += len(piece)
            pieces.append(piece)
        bulletin: bytes = peer_feed_pb2.Bulletin(news=pieces).SerializeToString()
        return bulletin

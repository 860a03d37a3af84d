"""A TCP relay between an Envoy and its control plane that observes every xDS message and its time.

Both sides speak HTTP/2 with each other: the relay does not change settings, flow control or pings. It parses
only the DATA frames (RFC 9113, 6.1) and the gRPC messages in them: one byte for compression, four bytes of
length, the message (grpc/grpc doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf.message import DecodeError

from controlplane import address as addresses
from controlplane.xds.resource_type import ENDPOINTS

_CLIENT_PREFACE_BYTES = 24  # sent by a client before its first frame
_FRAME_HEADER_BYTES = 9
_MESSAGE_HEADER_BYTES = 5
_DATA_FRAME_TYPE, _PADDED_FLAG = 0x0, 0x8
_READ_SIZE_BYTES = 65_536

HealthByEndpoint = dict[str, int]  # endpoint -> core.v3.HealthStatus, of one response
HEALTHY = health_check_pb2.HEALTHY
DRAINING = health_check_pb2.DRAINING


class EndpointsRejected(Exception):
    """The Envoy rejected the endpoints that a benchmark waits for."""


class GrpcMessageReader:
    """Extracts the gRPC messages of one direction of an HTTP/2 connection."""

    def __init__(self, *, skip: int = 0) -> None:
        """`skip`: bytes before the first frame."""
        self._skip = skip
        self._frames = bytearray()
        self._streams: defaultdict[int, bytearray] = defaultdict(bytearray)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Process received bytes and yield the messages that they complete."""
        self._frames += data
        if self._skip:
            skipped = min(self._skip, len(self._frames))
            del self._frames[:skipped]
            self._skip -= skipped
        while len(self._frames) >= _FRAME_HEADER_BYTES:
            end = _FRAME_HEADER_BYTES + int.from_bytes(self._frames[:3], "big")
            if len(self._frames) < end:
                return
            kind, flags = self._frames[3], self._frames[4]
            payload = bytes(self._frames[_FRAME_HEADER_BYTES:end])
            stream = int.from_bytes(self._frames[5:9], "big")
            del self._frames[:end]
            if kind == _DATA_FRAME_TYPE:
                if flags & _PADDED_FLAG:
                    payload = payload[1 : len(payload) - payload[0]]
                yield from self._extract_messages(stream, payload)

    def _extract_messages(self, stream: int, payload: bytes) -> Iterator[bytes]:
        pending = self._streams[stream]
        pending += payload
        while len(pending) >= _MESSAGE_HEADER_BYTES:
            end = _MESSAGE_HEADER_BYTES + int.from_bytes(pending[1:_MESSAGE_HEADER_BYTES], "big")
            if len(pending) < end:
                return
            yield bytes(pending[_MESSAGE_HEADER_BYTES:end])
            del pending[:end]


class XdsTap:
    """Waits for Envoy's ACK of endpoints that satisfy a condition. One condition at a time."""

    def __init__(self, control_plane_port: int) -> None:
        """`control_plane_port`: the control plane's xDS port on 127.0.0.1."""
        self._control_plane_port = control_plane_port
        self._condition: Callable[[HealthByEndpoint], bool] | None = None
        self._ack_future: asyncio.Future[float] | None = None
        self._nonce = ""  # of the response that satisfied the condition
        self.relayed_at = 0.0
        """When the response that satisfied the latest condition was read from the control plane."""

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, port: int, control_plane_port: int) -> AsyncIterator[XdsTap]:
        """Relay connections to `port` while the block runs."""
        tap = cls(control_plane_port)
        server = await asyncio.start_server(tap._relay, "127.0.0.1", port)
        try:
            yield tap
        finally:
            server.close()

    def expect_ack(self, condition: Callable[[HealthByEndpoint], bool]) -> asyncio.Future[float]:
        """Return a future of the time when Envoy's ACK of the next response with such endpoints is read.

        The time is of `time.perf_counter`. The future raises EndpointsRejected if Envoy rejects the response.
        """
        self._condition, self._nonce = condition, ""
        self._ack_future = asyncio.get_running_loop().create_future()
        return self._ack_future

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._control_plane_port)
        except OSError:
            writer.transport.abort()  # Envoy retries, as it does without the relay
            return
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(
                    _pump(
                        reader, upstream[1], GrpcMessageReader(skip=_CLIENT_PREFACE_BYTES), self._on_request
                    )
                )
                pumps.create_task(_pump(upstream[0], writer, GrpcMessageReader(), self._on_response))
        except* OSError:
            pass
        finally:
            upstream[1].transport.abort()
            writer.transport.abort()

    def _on_response(self, message: bytes, at: float) -> None:
        if self._condition is None:
            return
        response = _parse(discovery_pb2.DiscoveryResponse, message)
        if (
            response is not None
            and response.type_url == ENDPOINTS.url
            and self._condition(_health_by_endpoint(response))
        ):
            self._condition, self._nonce, self.relayed_at = None, response.nonce, at

    def _on_request(self, message: bytes, at: float) -> None:
        if not self._nonce or self._ack_future is None or self._ack_future.done():
            return
        request = _parse(discovery_pb2.DiscoveryRequest, message)
        if request is None or request.type_url != ENDPOINTS.url or request.response_nonce != self._nonce:
            return
        if request.HasField("error_detail"):
            self._ack_future.set_exception(EndpointsRejected(request.error_detail.message))
        else:
            self._ack_future.set_result(at)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    messages: GrpcMessageReader,
    on_message: Callable[[bytes, float], None],
) -> None:
    """Forward bytes first, then parse them. At the end, raise to end the other direction, too."""
    while data := await reader.read(_READ_SIZE_BYTES):
        at = time.perf_counter()
        writer.write(data)
        for message in messages.feed(data):
            on_message(message, at)
        await writer.drain()
    raise ConnectionResetError


def _parse(message_type: Any, message: bytes) -> Any:
    """Parse a message; None for a message of another service: load reports share the connection."""
    try:
        return message_type.FromString(message)
    except DecodeError:
        return None


def _health_by_endpoint(response: Any) -> HealthByEndpoint:
    health: HealthByEndpoint = {}
    for resource in response.resources:
        assignment = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value)
        for locality in assignment.endpoints:
            for endpoint in locality.lb_endpoints:
                socket_address = endpoint.endpoint.address.socket_address
                address = addresses.join(socket_address.address, socket_address.port_value)
                health[address] = endpoint.health_status
    return health

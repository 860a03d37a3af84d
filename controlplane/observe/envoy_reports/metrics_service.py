"""The gRPC service to which Envoys with the module push their stats (`envoy.stat_sinks.metrics_service`).

It runs on the xDS port, whose authorization decides which Envoy may send, and under which id. A message may
have 4 MiB, the limit of that port: about 40,000 series. Envoy's `batch_size` keeps the size and the
processing time of a message far below that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Set
from functools import partial
from typing import Protocol

import grpc

from controlplane.clock import Clock
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream

_SERVICE = "envoy.service.metrics.v3.MetricsService"


class TelemetrySink(Protocol):
    """Receives the raw messages of all streams. `number` identifies a stream and is never reused."""

    def telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        """Receive a message that was made at that time; `first`: it is the first one of its stream."""

    def telemetry_ended(self, number: int) -> None:
        """Receive the end of a stream."""


class MetricsService:
    """Receives the streams; `publish` gets every report of a module."""

    def __init__(
        self,
        publish: Callable[[ModuleReport], None],
        clock: Clock,
        *,
        known_nodes: Callable[[], Set[str]],
        sink: TelemetrySink | None = None,
    ) -> None:
        """`known_nodes` returns the addresses of all nodes."""
        self._publish = publish
        self._clock = clock
        self._known_nodes = known_nodes
        self._series_cache = SeriesCache()
        self._sink = sink
        self._stream_numbers = itertools.count(1)

    def new_stream(self, resumed_envoy: str = "") -> TelemetryStream:
        """Return a parser for a stream that another replica forwards; see TelemetryStream."""
        return TelemetryStream(self._known_nodes, self._series_cache, resumed_envoy=resumed_envoy)

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started yet; `authorize` decides which Envoy may send."""
        # No deserializer: most of a message is never parsed.
        methods = {
            "StreamMetrics": grpc.stream_unary_rpc_method_handler(partial(self._serve_stream, authorize))
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))

    async def _serve_stream(
        self, authorize: AuthorizeEnvoy, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        stream, number = self.new_stream(), next(self._stream_numbers)
        try:
            await self._receive_messages(stream, number, authorize, messages, context)
        finally:
            if self._sink is not None:
                self._sink.telemetry_ended(number)
        return b""  # the empty response

    async def _receive_messages(
        self,
        stream: TelemetryStream,
        number: int,
        authorize: AuthorizeEnvoy,
        messages: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> None:
        is_authorized = False
        async for data in messages:
            report = stream.receive(data, self._clock())
            if not stream.envoy:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "the first message has no node.id; give this Envoy one in its bootstrap (node.id)",
                )
            is_first = not is_authorized
            if is_first:
                await authorize(context, stream.envoy)
                is_authorized = True
            if report is not None:
                self._publish(report)
            if self._sink is not None:
                self._sink.telemetry(number, stream.envoy, stream.last_message_at, data, first=is_first)

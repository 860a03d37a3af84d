"""The gRPC service to which Envoys with the Tidevoy module send stats (`envoy.stat_sinks.metrics_service`).

It runs on the xDS port, with the authorization of that port, which limits a message to 4 MiB, about 40,000
series. Envoy's setting `batch_size` makes messages much smaller.
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


class ReportForwarder(Protocol):
    """Forwards the reports of Envoys, unchanged, to other replicas of the control plane."""

    def forward_load_report(self, envoy: str, at: float, report: bytes) -> None:
        """Send a serialized load report that the Envoy made at the time `at`."""

    def forward_telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        """Send a message of the metrics stream `number`; `first`: it is the first message of this stream.

        Stream numbers are never reused.
        """

    def forward_statements(self, envoy: str, at: float, report: bytes) -> None:
        """Send a serialized report of statements that arrived at the time `at`."""

    def forward_telemetry_end(self, number: int) -> None:
        """Notify the replicas that the metrics stream `number` has ended."""


class MetricsService:
    """Receives the metrics streams and calls `publish` with every report of a module."""

    def __init__(
        self,
        publish: Callable[[ModuleReport], None],
        clock: Clock,
        *,
        known_nodes: Callable[[], Set[str]],
        forwarder: ReportForwarder | None = None,
    ) -> None:
        """`known_nodes` returns the addresses of all nodes."""
        self._publish = publish
        self._clock = clock
        self._known_nodes = known_nodes
        self._series_cache = SeriesCache()
        self._forwarder = forwarder
        self._stream_numbers = itertools.count(1)

    def new_stream(self, resumed_envoy: str = "") -> TelemetryStream:
        """Return a parser for a new or forwarded stream; `resumed_envoy` as in `TelemetryStream`."""
        return TelemetryStream(self._known_nodes, self._series_cache, resumed_envoy=resumed_envoy)

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started; `authorize` decides which Envoys may send."""
        # Without a deserializer, since most parts of a message are never parsed.
        methods = {
            "StreamMetrics": grpc.stream_unary_rpc_method_handler(partial(self._serve_stream, authorize))
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))

    async def _serve_stream(
        self, authorize: AuthorizeEnvoy, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        stream, number = self.new_stream(), next(self._stream_numbers)
        is_first = True
        try:
            async for data in messages:
                report = stream.receive(data, self._clock())
                if not stream.envoy:
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "the first message has no node.id; give this Envoy one in its bootstrap (node.id)",
                    )
                if is_first:
                    await authorize(context, stream.envoy)
                if report is not None:
                    self._publish(report)
                if self._forwarder is not None:
                    self._forwarder.forward_telemetry(
                        number, stream.envoy, stream.last_message_at, data, first=is_first
                    )
                is_first = False
        finally:
            if self._forwarder is not None:
                self._forwarder.forward_telemetry_end(number)
        return b""  # the empty `StreamMetricsResponse`

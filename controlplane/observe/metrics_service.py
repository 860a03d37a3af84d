"""The gRPC service that Envoys with the module push their stats to (`envoy.stat_sinks.metrics_service`).

It stands on the xDS port, so who may speak there may speak here. A message may have 4 MiB, the limit of that
port: some 40,000 series. Envoy's `batch_size` keeps messages, and the time that each takes, far below that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Set

import grpc

from controlplane.clock import Clock
from controlplane.observe.recall import Recall
from controlplane.observe.telemetry import TelemetryStream
from controlplane.traffic import ModuleReport

_SERVICE = "envoy.service.metrics.v3.MetricsService"


class MetricsService:
    """Takes in the streams; `publish` hears of every report of a module."""

    def __init__(
        self, publish: Callable[[ModuleReport], None], clock: Clock, *, known: Callable[[], Set[str]]
    ) -> None:
        """`known` gives the addresses of all nodes."""
        self._publish = publish
        self._clock = clock
        self._known = known
        self._recall = Recall()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not been started yet."""
        # No serialisers: most of a message is not parsed at all.
        methods = {"StreamMetrics": grpc.stream_unary_rpc_method_handler(self._stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))

    async def _stream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        stream = TelemetryStream(self._known, self._recall)
        async for data in messages:
            report = stream.feed(data, self._clock())
            if not stream.envoy:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "the first message has no node.id; give this Envoy one in its bootstrap (node.id)",
                )
            if report is not None:
                self._publish(report)
        return b""  # the empty response

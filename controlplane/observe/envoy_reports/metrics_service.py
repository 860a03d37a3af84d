"""The gRPC service that Envoys with the module push their stats to (`envoy.stat_sinks.metrics_service`).

It stands on the xDS port, which says who may speak, and under which name. A message may have 4 MiB, the limit
of that port: some 40,000 series. Envoy's `batch_size` keeps messages, and the time that each takes, far below
that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Set
from functools import partial
from typing import Protocol

import grpc

from controlplane.clock import Clock
from controlplane.grpc_auth import Admit
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.series_cache import Recall
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream

_SERVICE = "envoy.service.metrics.v3.MetricsService"


class Tap(Protocol):
    """Gets the messages of all streams as they came. `number` is that of a stream; none is used twice."""

    def telemetry(self, number: int, envoy: str, at: float, data: bytes, *, first: bool) -> None:
        """A message came that was made at that time, the `first` of its stream or a later one."""

    def telemetry_ended(self, number: int) -> None:
        """Nothing more comes of that stream."""


class MetricsService:
    """Takes in the streams; `publish` hears of every report of a module."""

    def __init__(
        self,
        publish: Callable[[ModuleReport], None],
        clock: Clock,
        *,
        known: Callable[[], Set[str]],
        tap: Tap | None = None,
    ) -> None:
        """`known` gives the addresses of all nodes."""
        self._publish = publish
        self._clock = clock
        self._known = known
        self._recall = Recall()
        self._tap = tap
        self._numbers = itertools.count(1)

    def stream(self, joined: str = "") -> TelemetryStream:
        """What takes in the messages of a stream that ends elsewhere; `joined`: see `TelemetryStream`."""
        return TelemetryStream(self._known, self._recall, joined=joined)

    def register(self, server: grpc.aio.Server, admit: Admit) -> None:
        """Add the service to a server that has not been started yet; `admit` is asked who may tell."""
        # No serialisers: most of a message is not parsed at all.
        methods = {"StreamMetrics": grpc.stream_unary_rpc_method_handler(partial(self._stream, admit))}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))

    async def _stream(
        self, admit: Admit, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        stream, number = self.stream(), next(self._numbers)
        try:
            await self._take(stream, number, admit, messages, context)
        finally:
            if self._tap is not None:
                self._tap.telemetry_ended(number)
        return b""  # the empty response

    async def _take(
        self,
        stream: TelemetryStream,
        number: int,
        admit: Admit,
        messages: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> None:
        admitted = False
        async for data in messages:
            report = stream.feed(data, self._clock())
            if not stream.envoy:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "the first message has no node.id; give this Envoy one in its bootstrap (node.id)",
                )
            is_first = not admitted
            if is_first:
                await admit(context, stream.envoy)
                admitted = True
            if report is not None:
                self._publish(report)
            if self._tap is not None:
                self._tap.telemetry(number, stream.envoy, stream.at, data, first=is_first)

"""Receives load reports (LRS): each Envoy periodically reports its live and new connections per endpoint.

Envoy reports if its bootstrap has `cluster_manager.load_stats_config`; with `send_all_clusters`, no cluster
needs an `lrs_server`. Protocol: envoyproxy/envoy api/envoy/service/load_stats/v3/lrs.proto. The observed
behavior of Envoy 1.40.0 determines what a count of zero proves:

* A report arrives every interval, even without any connections. It always contains the cluster, but neither
  endpoints without live and new connections nor localities without such endpoints. So an endpoint that is
  missing in a report has no connection, and an empty node is detected within one interval.
* DRAINING and UNHEALTHY endpoints are reported as long as they have connections. Changes of weight and
  metadata do not affect the counts.
* An endpoint that is *removed* from EDS disappears from the reports at once although its connections live on,
  and returns with a count of zero. The same happens to all endpoints of a cluster that is *updated by CDS*:
  connections from before the update are never reported again. A zero after either proves nothing.
* Connections that are being established (TCP counts from "connected") or that failed are not counted. So a
  zero covers only connections whose endpoint was picked at least one connect timeout ago.
* After a stream breaks, Envoy reconnects 5 s later. The first message of the new stream repeats the last
  report of the old one and is ignored. Connections that were opened in between are missing in `new_sessions`.
* A further response on the stream with another interval takes effect from the next report on.
* A report contains the time since the previous one (`load_report_interval`), by Envoy's monotonic clock. So a
  report that waited in a socket while this process was stalled is known to be old: meanwhile another replica
  may have closed a node, and an old count of zero must not be taken for the end of that drain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import grpc
from envoy.service.load_stats.v3 import lrs_pb2

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.facts import EnvoyLoad
from controlplane.observe.clock_offset import ClockOffset
from controlplane.observe.envoy_reports.telemetry_pb2 import EndpointLoad, LoadReport

_SERVICE = "envoy.service.load_stats.v3.LoadReportingService"


class LoadReportService:
    """The gRPC service for load reports; `publish` gets every report."""

    def __init__(
        self,
        publish: Callable[[EnvoyLoad], None],
        clock: Clock,
        *,
        interval: Callable[[], float],
        cluster: str = "tidb",
        sink: Callable[[str, float, bytes], None] = lambda envoy, at, report: None,
    ) -> None:
        """`interval` returns the seconds between two reports; Envoys get a new value with the next response.

        Only `cluster` and the clusters of groups count: an Envoy also reports the cluster of its connection
        to the control plane. `sink` also gets every report: Envoy id, time of the report, serialized report.
        """
        self._publish = publish
        self._clock = clock
        self._interval = interval
        self._cluster = cluster
        self._sink = sink

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started yet; `authorize` decides who may report."""
        handler = grpc.stream_stream_rpc_method_handler(
            partial(self._serve_stream, authorize),
            request_deserializer=lambda data: (data, LoadReport.FromString(data)),
            response_serializer=lrs_pb2.LoadStatsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"StreamLoadStats": handler}),)
        )

    async def _serve_stream(
        self,
        authorize: AuthorizeEnvoy,
        requests: AsyncIterator[tuple[bytes, LoadReport]],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[lrs_pb2.LoadStatsResponse]:
        envoy = ""
        requested_interval = 0.0
        report_clock = _ReportClock()
        async for data, request in requests:
            if requested_interval:
                at = report_clock.report_time(request, self._clock())
                self._publish(parse_load_report(request, envoy, at, self._cluster))
                self._sink(envoy, at, data)
            elif request.node.id:
                envoy = request.node.id
                await authorize(context, envoy)
                report_clock.start(self._clock())
            else:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "the first message has no node.id; give this Envoy one in its bootstrap (node.id)",
                )
            interval = self._interval()
            if interval != requested_interval:
                requested_interval = interval
                yield _build_response(interval)


class _ReportClock:
    """Computes when the reports of a stream were made, by our clock."""

    def __init__(self) -> None:
        self._elapsed = 0.0  # seconds by the Envoy's clock since the stream started
        self._clock_offset = ClockOffset()

    def start(self, now: float) -> None:
        """Start the clock when the Envoy is asked to report."""
        self._clock_offset.observe(self._elapsed, now)

    def report_time(self, report: LoadReport, now: float) -> float:
        """Return when a report that arrived `now` was made; `now` if it contains no interval."""
        interval = max(
            (_to_seconds(stats.load_report_interval) for stats in report.cluster_stats), default=0.0
        )
        if interval <= 0:
            return now
        self._elapsed += interval
        self._clock_offset.observe(self._elapsed, now)
        return min(now, self._clock_offset.to_local(self._elapsed))


def _to_seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def parse_load_report(report: LoadReport, envoy: str, at: float, cluster: str) -> EnvoyLoad:
    """Return the sum over the cluster and the clusters of groups (`CLUSTER-NAME`) of a report."""
    sessions: dict[str, int] = {}
    new_sessions: dict[str, int] = {}
    for stats in report.cluster_stats:
        if stats.cluster_name != cluster and not stats.cluster_name.startswith(f"{cluster}-"):
            continue
        for locality in stats.upstream_locality_stats:
            # Iterating over a slice is twice as fast as over the container.
            for endpoint, live_count, new_count in map(_parse_endpoint, locality.upstream_endpoint_stats[:]):
                if live_count:
                    sessions[endpoint] = sessions.get(endpoint, 0) + live_count
                if new_count:
                    new_sessions[endpoint] = new_sessions.get(endpoint, 0) + new_count
    return EnvoyLoad(
        envoy, at, sessions=MappingProxyType(sessions), new_sessions=MappingProxyType(new_sessions)
    )


@lru_cache(maxsize=65_536)  # all Envoys report the same endpoint with the same counts again and again
def _parse_endpoint(serialised: bytes) -> tuple[str, int, int]:
    """Return (endpoint, live connections, connections that were opened since the previous report)."""
    stats = EndpointLoad.FromString(serialised)
    socket_address = stats.address.socket_address
    endpoint = addresses.join(socket_address.address, socket_address.port_value)
    return endpoint, stats.total_requests_in_progress, stats.total_issued_requests


def _build_response(interval: float) -> lrs_pb2.LoadStatsResponse:
    response = lrs_pb2.LoadStatsResponse(send_all_clusters=True, report_endpoint_granularity=True)
    response.load_reporting_interval.FromNanoseconds(round(interval * 1e9))
    return response

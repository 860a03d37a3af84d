"""Load reports: each Envoy tells, at an interval, its live and new connections per endpoint (LRS).

Envoy reports when its bootstrap has `cluster_manager.load_stats_config`; with `send_all_clusters` no cluster
needs an `lrs_server`. Protocol: envoyproxy/envoy api/envoy/service/load_stats/v3/lrs.proto. What Envoy 1.40.0
was seen to do, which decides what a zero is worth:

* A report comes every interval, also when there is nothing to tell. A cluster is always named; endpoints
  without live and new connections are left out, and with the last of them the whole locality. So an endpoint
  that a report does not name has no connection, and a node is seen to be empty within an interval.
* DRAINING and UNHEALTHY endpoints go on being reported as long as they have connections. Changes of weight
  and metadata do not disturb the counts.
* An endpoint that is *removed* from EDS is left out at once although its connections live on, and comes back
  with a count of zero. The same befalls all endpoints of a cluster that is *updated by CDS*: connections from
  before the update are never reported again. A zero after either proves nothing.
* A connection that is still being made is not counted (TCP counts from "connected"), nor one that failed. A
  zero says so only of what was chosen a connect timeout ago.
* After the stream broke Envoy comes back 5 s later. The first message of the new stream repeats the last
  report of the old one; it is no news and is not used. What was opened in between is lost to `opened`.
* Answering the stream again with another interval takes effect from the next report on.
* A report says how long ago the one before it was (`load_report_interval`), by Envoy's monotonic clock. So
  one that waited in a socket while we hung is known to be old: another control plane may have closed a node
  meanwhile, and "nobody is there" of before would pass for the end of a drain.
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
    """The gRPC service that Envoys report to; `publish` hears of every report."""

    def __init__(
        self,
        publish: Callable[[EnvoyLoad], None],
        clock: Clock,
        *,
        interval: Callable[[], float],
        cluster: str = "tidb",
        sink: Callable[[str, float, bytes], None] = lambda envoy, at, report: None,
    ) -> None:
        """`interval` gives the seconds between two reports; Envoys are told when it has changed.

        Only what they report of `cluster`, and of those of groups, counts: an Envoy also has one for its
        connection to us. `tap` gets every report too: the Envoy's id, when it was made, and the bytes.
        """
        self._publish = publish
        self._clock = clock
        self._interval = interval
        self._cluster = cluster
        self._sink = sink

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not been started yet; `admit` is asked who may report."""
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
    """When the reports of a stream were made, by our clock."""

    def __init__(self) -> None:
        self._elapsed = 0.0  # by the Envoy's clock, since it was asked to report
        self._clock_offset = ClockOffset()

    def start(self, now: float) -> None:
        """The Envoy is asked to report."""
        self._clock_offset.observe(self._elapsed, now)

    def report_time(self, report: LoadReport, now: float) -> float:
        """When a report was made that has come now; `now` if it does not tell of any time."""
        interval = max((_to_seconds(each.load_report_interval) for each in report.cluster_stats), default=0.0)
        if interval <= 0:
            return now
        self._elapsed += interval
        self._clock_offset.observe(self._elapsed, now)
        return min(now, self._clock_offset.to_local(self._elapsed))


def _to_seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def parse_load_report(report: LoadReport, envoy: str, at: float, cluster: str) -> EnvoyLoad:
    """What a report says of a cluster and those of groups (`CLUSTER-NAME`), as a fact; all is summed up."""
    sessions: dict[str, int] = {}
    new_sessions: dict[str, int] = {}
    for reported in report.cluster_stats:
        if reported.cluster_name != cluster and not reported.cluster_name.startswith(f"{cluster}-"):
            continue
        for locality in reported.upstream_locality_stats:
            # A slice is twice as quick to walk as the container.
            for endpoint, now, new in map(_parse_endpoint, locality.upstream_endpoint_stats[:]):
                if now:
                    sessions[endpoint] = sessions.get(endpoint, 0) + now
                if new:
                    new_sessions[endpoint] = new_sessions.get(endpoint, 0) + new
    return EnvoyLoad(
        envoy, at, sessions=MappingProxyType(sessions), new_sessions=MappingProxyType(new_sessions)
    )


@lru_cache(maxsize=65_536)  # an endpoint with so many connections is told again and again, by all Envoys
def _parse_endpoint(serialised: bytes) -> tuple[str, int, int]:
    """An endpoint, its live connections, and those that were opened since the report before."""
    stats = EndpointLoad.FromString(serialised)
    socket_address = stats.address.socket_address
    endpoint = addresses.join(socket_address.address, socket_address.port_value)
    return endpoint, stats.total_requests_in_progress, stats.total_issued_requests


def _build_response(interval: float) -> lrs_pb2.LoadStatsResponse:
    response = lrs_pb2.LoadStatsResponse(send_all_clusters=True, report_endpoint_granularity=True)
    response.load_reporting_interval.FromNanoseconds(round(interval * 1e9))
    return response

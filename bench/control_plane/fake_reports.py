"""What simulated Envoys tell of their sessions, as bytes: load reports, and the stats of the module."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from envoy.config.endpoint.v3 import load_report_pb2
from envoy.service.load_stats.v3 import lrs_pb2

from bench.control_plane.session_simulator import instance_id
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS
from controlplane.observe.envoy_reports.telemetry_pb2 import LabelPair, MetricFamily
from controlplane.version import VERSION
from controlplane.xds.any_encoding import serialise, socket_address
from controlplane.xds.protobuf_encoding import delimited, varint

# Field numbers of endpoint.v3: the endpoints of a locality; what an endpoint has in progress, and was issued.
_ENDPOINT_STATS_FIELD, _IN_PROGRESS_FIELD, _ISSUED_FIELD = 7, 3, 7
# Field numbers of StreamMetricsMessage, and of io.prometheus.client: MetricFamily, Metric, Counter and Gauge.
_FAMILIES_FIELD, _TYPE_FIELD, _METRIC_FIELD, _GAUGE_FIELD, _COUNTER_FIELD, _TIMESTAMP_FIELD = 2, 3, 4, 2, 3, 6
_DOUBLE_TAG = b"\x09"  # field 1 of Counter and Gauge
_VALUE_PLACEHOLDER, _TIME_PLACEHOLDER = (
    b"<value>.",
    b"<time>",
)  # of the length of a double, and of a time in milliseconds
_FAMILIES_PER_MESSAGE = 2_000  # families a message, as the bootstrap says
_ENVOY_FAMILY_COUNT = 400  # families of Envoy itself
_EMPTY_FAST_BUCKETS = 3  # buckets of latency that no command is in


class FakeLoadReports:
    """Load reports (LRS) of nodes that are given by number."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._addresses = [
            load_report_pb2.UpstreamEndpointStats(address=socket_address(each)).SerializeToString()
            for each in endpoints
        ]
        self._request = lrs_pb2.LoadStatsRequest()
        self._request.cluster_stats.add(cluster_name=CLUSTER_NAME).load_report_interval.seconds = 5

    def report(self, counts: Iterable[tuple[int, int, int]]) -> bytes:
        """A report of these nodes: number, live sessions, and those opened since the report before."""
        locality = b"".join(
            delimited(
                _ENDPOINT_STATS_FIELD,
                self._addresses[node]
                + _encode_varint_field(_IN_PROGRESS_FIELD, live)
                + _encode_varint_field(_ISSUED_FIELD, opened),
            )
            for node, live, opened in counts
        )
        stats = self._request.cluster_stats[0]
        del stats.upstream_locality_stats[:]
        stats.upstream_locality_stats.append(load_report_pb2.UpstreamLocalityStats.FromString(locality))
        return serialise(self._request)


class FakeModuleStats:
    """Flushes of Envoy's stats with the module's: counters first, then gauges, in messages of one size.

    Of a node they hold what queries lead to, or sessions alone. Values change, their places in the bytes do
    not.
    """

    def __init__(self, nodes: Sequence[str], *, with_all_series: bool) -> None:
        bounds = [*(f"{bound:g}" for bound in LATENCY_BOUNDS_SECONDS), "+Inf"][_EMPTY_FAST_BUCKETS:]
        series: list[tuple[str, dict[str, str]]] = [
            ("logins", {}),
            ("commands", {"kind": "query"}),
            *(("command_seconds_bucket", {"le": bound}) for bound in bounds),
            ("command_microseconds", {}),
            *(("bytes", {"direction": direction}) for direction in ("to_node", "to_client")),
        ]
        self._counters = [
            b"".join(
                _encode_family(f"tidevoy.{n}", _COUNTER_FIELD, {"node": a, **labels}) for n, labels in series
            )
            for a in nodes
        ]
        idle = [{"node": a, "state": "idle"} for a in nodes]
        self._sessions = [_encode_family("tidevoy.sessions", _GAUGE_FIELD, labels) for labels in idle]
        self._zero_sessions = [
            _encode_family("tidevoy.sessions", _GAUGE_FIELD, labels, is_zero=True) for labels in idle
        ]
        cluster = {"envoy.cluster_name": CLUSTER_NAME}
        self._envoy_families = b"".join(
            _encode_family(f"cluster.upstream_{n}", _COUNTER_FIELD, cluster)
            for n in range(_ENVOY_FAMILY_COUNT)
        )
        self._with_all_series = with_all_series
        self._nodes_per_message = _FAMILIES_PER_MESSAGE // len(series)

    def flush(self, envoy: int, counts: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
        """The messages of a flush. `counts`: node by number, live sessions, and commands so far."""
        timestamp = varint(int(time.time() * 1000))
        yield _fill_placeholders(self._envoy_families, 1, timestamp)
        for batch in _batches(counts if self._with_all_series else (), self._nodes_per_message):
            yield b"".join(
                _fill_placeholders(self._counters[node], commands, timestamp) for node, _, commands in batch
            )
        for batch in _batches(counts, _FAMILIES_PER_MESSAGE):
            yield b"".join(self._session_gauge(node, live, timestamp) for node, live, _ in batch)
        labels = {"version": VERSION, "instance": instance_id(envoy)}
        yield _fill_placeholders(_encode_family("tidevoy.module_info", _GAUGE_FIELD, labels), 1, timestamp)

    def _session_gauge(self, node: int, live: int, timestamp: bytes) -> bytes:
        return _fill_placeholders(
            self._sessions[node] if live else self._zero_sessions[node], live, timestamp
        )


def _encode_family(name: str, kind: int, labels: Mapping[str, str], *, is_zero: bool = False) -> bytes:
    """A series as a family of a message, with its value and time left open. A zero has no value."""
    metric = MetricFamily().metric.add()
    for label, text in labels.items():
        metric.label.append(LabelPair(name=label, value=text).SerializeToString())
    number = delimited(kind, b"" if is_zero else _DOUBLE_TAG + _VALUE_PLACEHOLDER)
    body = metric.SerializeToString() + number + varint(_TIMESTAMP_FIELD << 3) + _TIME_PLACEHOLDER
    head = MetricFamily(name=name).SerializeToString() + _encode_varint_field(
        _TYPE_FIELD, int(kind == _GAUGE_FIELD)
    )
    return delimited(_FAMILIES_FIELD, head + delimited(_METRIC_FIELD, body))


def _fill_placeholders(families: bytes, value: int, timestamp: bytes) -> bytes:
    return families.replace(_VALUE_PLACEHOLDER, struct.pack("<d", value)).replace(
        _TIME_PLACEHOLDER, timestamp
    )


def _batches(counts: Sequence[tuple[int, int, int]], size: int) -> Iterator[Sequence[tuple[int, int, int]]]:
    return (counts[i : i + size] for i in range(0, len(counts), size))


def _encode_varint_field(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""

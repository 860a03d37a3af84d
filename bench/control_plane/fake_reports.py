"""Serialized load reports and module stats, as simulated Envoys send them about their sessions."""

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
from controlplane.xds.protobuf_encoding import delimited, socket_address, varint

# Field numbers of StreamMetricsMessage, and of io.prometheus.client: MetricFamily, Metric, Counter and Gauge.
_FAMILIES_FIELD, _TYPE_FIELD, _METRIC_FIELD, _GAUGE_FIELD, _COUNTER_FIELD, _TIMESTAMP_FIELD = 2, 3, 4, 2, 3, 6
_DOUBLE_TAG = b"\x09"  # field 1 of Counter and Gauge
# The placeholders have the length of a double, and of a varint of milliseconds.
_VALUE_PLACEHOLDER, _TIME_PLACEHOLDER = b"<value>.", b"<time>"
_FAMILIES_PER_MESSAGE = 2_000  # `batch_size` in the bootstrap
_ENVOY_FAMILY_COUNT = 400  # Envoy's own families
_EMPTY_FAST_BUCKETS = 3  # the fastest latency buckets, which stay empty


class FakeLoadReports:
    """Builds load reports (LRS). Nodes are numbered."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._addresses = [socket_address(endpoint) for endpoint in endpoints]

    def report(self, counts: Iterable[tuple[int, int, int]]) -> bytes:
        """Build a report. `counts`: node number, live sessions, and sessions opened since the last report."""
        endpoints = (
            load_report_pb2.UpstreamEndpointStats(
                address=self._addresses[node], total_requests_in_progress=live, total_issued_requests=opened
            )
            for node, live, opened in counts
        )
        request = lrs_pb2.LoadStatsRequest()
        cluster = request.cluster_stats.add(cluster_name=CLUSTER_NAME)
        cluster.load_report_interval.seconds = 5
        cluster.upstream_locality_stats.add(upstream_endpoint_stats=endpoints)
        return bytes(request.SerializeToString())


class FakeModuleStats:
    """Builds stats flushes of an Envoy with the module: counters first, then gauges, in several messages.

    With `with_all_series`, a flush contains all series that queries change, otherwise only session counts.
    Each series is encoded once, with placeholders for value and time.
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
        """Yield the messages of a flush. `counts`: node number, live sessions, and commands so far."""
        timestamp = varint(int(time.time() * 1000))
        yield _fill_placeholders(self._envoy_families, 1, timestamp)
        for batch in _batches(counts if self._with_all_series else (), self._nodes_per_message):
            yield b"".join(
                _fill_placeholders(self._counters[node], commands, timestamp) for node, _, commands in batch
            )
        for batch in _batches(counts, _FAMILIES_PER_MESSAGE):
            yield b"".join(
                _fill_placeholders((self._sessions if live else self._zero_sessions)[node], live, timestamp)
                for node, live, _ in batch
            )
        labels = {"version": VERSION, "instance": instance_id(envoy)}
        yield _fill_placeholders(_encode_family("tidevoy.module_info", _GAUGE_FIELD, labels), 1, timestamp)


def _encode_family(name: str, kind: int, labels: Mapping[str, str], *, is_zero: bool = False) -> bytes:
    """Encode a series as a metric family with placeholders. `is_zero`: omit the value, as protobuf does."""
    metric = MetricFamily().metric.add()
    for label, text in labels.items():
        metric.label.append(LabelPair(name=label, value=text).SerializeToString())
    number = delimited(kind, b"" if is_zero else _DOUBLE_TAG + _VALUE_PLACEHOLDER)
    body = metric.SerializeToString() + number + varint(_TIMESTAMP_FIELD << 3) + _TIME_PLACEHOLDER
    header = MetricFamily(name=name).SerializeToString()
    if kind == _GAUGE_FIELD:
        header += varint(_TYPE_FIELD << 3) + varint(1)
    return delimited(_FAMILIES_FIELD, header + delimited(_METRIC_FIELD, body))


def _fill_placeholders(families: bytes, value: int, timestamp: bytes) -> bytes:
    return families.replace(_VALUE_PLACEHOLDER, struct.pack("<d", value)).replace(
        _TIME_PLACEHOLDER, timestamp
    )


def _batches(counts: Sequence[tuple[int, int, int]], size: int) -> Iterator[Sequence[tuple[int, int, int]]]:
    return (counts[i : i + size] for i in range(0, len(counts), size))

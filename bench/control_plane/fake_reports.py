"""What simulated Envoys tell of their sessions, as bytes: load reports, and the stats of the module."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from envoy.config.endpoint.v3 import load_report_pb2
from envoy.service.load_stats.v3 import lrs_pb2

from bench.control_plane.session_simulator import instance
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.model.traffic import BOUNDS
from controlplane.observe.envoy_reports.telemetry_pb2 import LabelPair, MetricFamily
from controlplane.version import VERSION
from controlplane.xds.any_encoding import serialise, socket_address
from controlplane.xds.protobuf_encoding import delimited, varint

# Field numbers of endpoint.v3: the endpoints of a locality; what an endpoint has in progress, and was issued.
_ENDPOINT_STATS, _IN_PROGRESS, _ISSUED = 7, 3, 7
# Field numbers of StreamMetricsMessage, and of io.prometheus.client: MetricFamily, Metric, Counter and Gauge.
_FAMILIES, _TYPE, _METRIC, _GAUGE, _COUNTER, _TIMESTAMP = 2, 3, 4, 2, 3, 6
_DOUBLE = b"\x09"  # field 1 of Counter and Gauge
_VALUE, _TIME = b"<value>.", b"<time>"  # of the length of a double, and of a time in milliseconds
_BATCH = 2_000  # families a message, as the bootstrap says
_OWN = 400  # families of Envoy itself
_FASTEST = 3  # buckets of latency that no command is in


class LoadTeller:
    """Load reports (LRS) of nodes that are given by number."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._addresses = [
            load_report_pb2.UpstreamEndpointStats(address=socket_address(each)).SerializeToString()
            for each in endpoints
        ]
        self._head = lrs_pb2.LoadStatsRequest()
        self._head.cluster_stats.add(cluster_name=CLUSTER_NAME).load_report_interval.seconds = 5

    def report(self, counts: Iterable[tuple[int, int, int]]) -> bytes:
        """A report of these nodes: number, live sessions, and those opened since the report before."""
        locality = b"".join(
            delimited(
                _ENDPOINT_STATS,
                self._addresses[node] + _number(_IN_PROGRESS, live) + _number(_ISSUED, opened),
            )
            for node, live, opened in counts
        )
        stats = self._head.cluster_stats[0]
        del stats.upstream_locality_stats[:]
        stats.upstream_locality_stats.append(load_report_pb2.UpstreamLocalityStats.FromString(locality))
        return serialise(self._head)


class ModuleTeller:
    """Flushes of Envoy's stats with the module's: counters first, then gauges, in messages of one size.

    Of a node they hold what queries lead to, or sessions alone. Values change, their places in the bytes do
    not.
    """

    def __init__(self, nodes: Sequence[str], *, tells_all: bool) -> None:
        bounds = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"][_FASTEST:]
        series: list[tuple[str, dict[str, str]]] = [
            ("logins", {}),
            ("commands", {"kind": "query"}),
            *(("command_seconds_bucket", {"le": bound}) for bound in bounds),
            ("command_microseconds", {}),
            *(("bytes", {"direction": direction}) for direction in ("to_node", "to_client")),
        ]
        self._counters = [
            b"".join(_family(f"tidevoy.{n}", _COUNTER, {"node": a, **labels}) for n, labels in series)
            for a in nodes
        ]
        idle = [{"node": a, "state": "idle"} for a in nodes]
        self._sessions = [_family("tidevoy.sessions", _GAUGE, labels) for labels in idle]
        self._none = [_family("tidevoy.sessions", _GAUGE, labels, is_zero=True) for labels in idle]
        cluster = {"envoy.cluster_name": CLUSTER_NAME}
        self._own = b"".join(_family(f"cluster.upstream_{n}", _COUNTER, cluster) for n in range(_OWN))
        self._tells_all = tells_all
        self._nodes_a_message = _BATCH // len(series)

    def flush(self, envoy: int, counts: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
        """The messages of a flush. `counts`: node by number, live sessions, and commands so far."""
        at = varint(int(time.time() * 1000))
        yield _filled(self._own, 1, at)
        for some in _batches(counts if self._tells_all else (), self._nodes_a_message):
            yield b"".join(_filled(self._counters[node], commands, at) for node, _, commands in some)
        for some in _batches(counts, _BATCH):
            yield b"".join(self._gauge(node, live, at) for node, live, _ in some)
        labels = {"version": VERSION, "instance": instance(envoy)}
        yield _filled(_family("tidevoy.module_info", _GAUGE, labels), 1, at)

    def _gauge(self, node: int, live: int, at: bytes) -> bytes:
        return _filled(self._sessions[node] if live else self._none[node], live, at)


def _family(name: str, kind: int, labels: Mapping[str, str], *, is_zero: bool = False) -> bytes:
    """A series as a family of a message, with its value and time left open. A zero has no value."""
    metric = MetricFamily().metric.add()
    for label, said in labels.items():
        metric.label.append(LabelPair(name=label, value=said).SerializeToString())
    number = delimited(kind, b"" if is_zero else _DOUBLE + _VALUE)
    body = metric.SerializeToString() + number + varint(_TIMESTAMP << 3) + _TIME
    head = MetricFamily(name=name).SerializeToString() + _number(_TYPE, int(kind == _GAUGE))
    return delimited(_FAMILIES, head + delimited(_METRIC, body))


def _filled(families: bytes, value: int, at: bytes) -> bytes:
    return families.replace(_VALUE, struct.pack("<d", value)).replace(_TIME, at)


def _batches(counts: Sequence[tuple[int, int, int]], size: int) -> Iterator[Sequence[tuple[int, int, int]]]:
    return (counts[i : i + size] for i in range(0, len(counts), size))


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""

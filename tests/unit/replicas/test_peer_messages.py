"""Messages between replicas: encoding and decoding, and streams that are joined in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from envoy.service.load_stats.v3 import lrs_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.model.facts import EnvoyLoad
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.series_cache import SeriesCache
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.replicas import peer_feed_pb2, peer_messages
from controlplane.replicas.merged_fleet import ReplicaFleet
from tests.support.controlplane.telemetry_messages import (
    metric_family,
    metrics_message,
    module_info_family,
    sessions_family,
)

NODE = "10.0.0.1:4000"
times = st.floats(0, 2e9)
texts = st.text(max_size=20)
nacks = st.builds(Nack, times, texts, texts, texts)
statuses = st.builds(
    EnvoyStatus,
    id=texts,
    address=texts,
    version=texts,
    filter=texts,
    connected_since=st.one_of(st.none(), times),
    last_seen=times,
    acked_version=texts,
    published_version=texts,
    eds_acked=st.booleans(),
    group=texts,
    zone=texts,
    module_version=texts,
    problem=texts,
    streams=st.integers(0, 5),
    stale_resources=st.lists(texts, max_size=3).map(tuple),
    last_nack=st.one_of(st.none(), nacks),
    nacks=st.integers(0, 1 << 40),
    certificate_expires_at=st.one_of(st.none(), times),
)
fleets = st.builds(
    ReplicaFleet,
    st.lists(statuses, max_size=4, unique_by=lambda status: status.id).map(tuple),
    st.one_of(st.none(), st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60))),
)


class RecordingReader:
    """Records the facts of one peer whose clock equals ours."""

    def __init__(self) -> None:
        self.loads: list[EnvoyLoad] = []
        self.reports: list[ModuleReport] = []
        self.fleets: list[ReplicaFleet] = []
        self.events: list[tuple[str, str, str, Mapping[str, Any]]] = []
        series_cache = SeriesCache()
        self._reader = peer_messages.PeerMessageReader(
            on_load=self.loads.append,
            on_report=self.reports.append,
            on_fleet=self.fleets.append,
            on_event=lambda *event: self.events.append(event),
            new_stream=lambda joined: TelemetryStream(lambda: {NODE}, series_cache, resumed_envoy=joined),
        )

    def receive(self, message: bytes, now: float = 0.0) -> None:
        self._reader.receive(message, now)


@given(fleets)
def test_fleet_round_trips(fleet: ReplicaFleet) -> None:
    reader = RecordingReader()
    reader.receive(peer_messages.encode_fleet(fleet, 0.0))
    assert reader.fleets == [fleet]


def test_times_are_converted_and_a_connection_keeps_its_time() -> None:
    def fleet(since: float | None) -> ReplicaFleet:
        return ReplicaFleet(
            (EnvoyStatus("e", "a", "v", "none", since, 1000.0, last_nack=Nack(900, "", "", "")),)
        )

    reader = RecordingReader()
    reader.receive(peer_messages.encode_fleet(fleet(950.0), 1000.0), now=5000.0)
    reader.receive(
        peer_messages.encode_fleet(fleet(950.0), 1001.0), now=5000.5
    )  # this one arrived half a second sooner
    reader.receive(peer_messages.encode_fleet(fleet(951.0), 1002.0), now=5002.0)
    reader.receive(peer_messages.encode_fleet(fleet(None), 1003.0), now=5002.5)
    (first, sooner, reconnected, ended) = [fleet.statuses[0] for fleet in reader.fleets]
    assert (first.connected_since, first.last_seen) == (4950.0, 5000.0)
    assert (sooner.connected_since, sooner.last_seen) == (4950.0, 4999.5)
    assert (reconnected.connected_since, ended.connected_since) == (4950.5, None)
    assert first.last_nack is not None
    assert first.last_nack.at == 4900.0


def test_load_report_decodes_as_at_its_receiver() -> None:
    report = lrs_pb2.LoadStatsRequest()
    cluster = report.cluster_stats.add(cluster_name="tidb-olap")
    stats = cluster.upstream_locality_stats.add().upstream_endpoint_stats.add(total_requests_in_progress=7)
    stats.address.socket_address.address = "10.0.0.1"
    stats.address.socket_address.port_value = 4000
    report.cluster_stats.add(cluster_name="tidevoy_control_plane")
    reader = RecordingReader()
    reader.receive(peer_messages.encode_load("e", 99.0, report.SerializeToString()), now=100.0)
    (load,) = reader.loads
    assert (load.envoy, load.at, dict(load.sessions)) == ("e", 100.0, {NODE: 7})


@given(texts, texts, texts, st.dictionaries(texts, st.one_of(texts, st.integers(-5, 5), st.booleans())))
def test_event_round_trips(kind: str, subject: str, text: str, data: Mapping[str, Any]) -> None:
    reader = RecordingReader()
    reader.receive(peer_messages.encode_event(kind, subject, text, data, 0.0))
    assert reader.events == [(kind, subject, text, data)]


def test_values_without_json_type_become_strings() -> None:
    reader = RecordingReader()
    reader.receive(peer_messages.encode_event("audit.drain", "n", "m", {"who": {1}}, 0.0))
    assert reader.events == [("audit.drain", "n", "m", {"who": "{1}"})]


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff",
        peer_feed_pb2.News(load=peer_feed_pb2.Load(report=b"\xff")).SerializeToString(),
        peer_feed_pb2.News(event=peer_feed_pb2.Event(data="{")).SerializeToString(),
        peer_feed_pb2.News(event=peer_feed_pb2.Event(data="[]")).SerializeToString(),
    ],
)
def test_invalid_message_raises_unreadable_message(message: bytes) -> None:
    with pytest.raises(peer_messages.UnreadableMessage):
        RecordingReader().receive(message)


def test_unknown_messages_are_ignored() -> None:
    reader = RecordingReader()
    reader.receive(peer_feed_pb2.News(at=1.0).SerializeToString() + b"\xa2\x06\x01x")
    assert (reader.loads, reader.reports, reader.fleets, reader.events) == ([], [], [], [])


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("envoy.nack", True),
        ("audit.node_drain", True),
        ("node.state", False),
        ("replica.leader_elected", False),
    ],
)
def test_only_envoy_and_audit_events_are_shared(kind: str, shared: bool) -> None:
    assert peer_messages.is_shared_event(kind) is shared


# --- metrics streams ---

COUNTERS = (
    metric_family("tidevoy.logins", 9, node=NODE),
    metric_family("tidevoy.commands", 5, node=NODE, kind="query"),
)
GAUGES = (sessions_family(3, NODE), module_info_family("0" * 16), sessions_family(2, NODE, "transaction"))
FLUSH = tuple(metrics_message(family) for family in (*COUNTERS, *GAUGES))  # one message per family


def send_telemetry(
    reader: RecordingReader, *messages: bytes, at: float, first: bool = False, number: int = 1
) -> None:
    for index, message in enumerate(messages):
        reader.receive(
            peer_messages.encode_telemetry(number, "e", at, message, first=first and index == 0), now=at
        )


def test_stream_received_from_its_start_gives_complete_reports() -> None:
    reader = RecordingReader()
    identified = (metrics_message(COUNTERS[0], envoy="e"), *FLUSH[1:])
    send_telemetry(reader, *identified, at=10.0, first=True)
    send_telemetry(reader, *FLUSH, at=11.0)
    first, second = reader.reports
    assert (first.envoy, first.is_first, first.session_counts) == ("e", True, None)
    assert first.nodes[NODE].logins == 9
    assert second.session_counts is not None
    assert dict(second.session_counts.sessions) == {NODE: 5}
    assert second.session_counts.counting_since == 9.0
    assert second.nodes[NODE].sessions == {"idle": 3, "transaction": 2}


@given(st.integers(0, len(FLUSH)))
def test_partial_flush_is_never_reported_as_complete(missed: int) -> None:
    """Wherever a stream is joined, the first report has all counters, and session counts are complete."""
    reader = RecordingReader()
    send_telemetry(reader, *FLUSH[missed:], at=10.0)
    for second in range(1, 4):
        send_telemetry(reader, *FLUSH, at=10.0 + second)
    assert [report.envoy for report in reader.reports] == ["e"] * len(reader.reports)
    assert [report.is_first for report in reader.reports[:2]] == [True, False]
    for report in reader.reports:
        assert report.nodes[NODE].logins == 9
        assert report.nodes[NODE].commands == {"query": 5}
        if report.session_counts is not None:
            assert dict(report.session_counts.sessions) == {NODE: 5}
            assert NODE in report.session_counts.complete_nodes or not report.session_counts.complete_nodes
    assert reader.reports[-1].session_counts is not None
    assert reader.reports[-1].session_counts.complete_nodes == {NODE}


def test_partially_missed_flush_is_not_counted_in_any_order() -> None:
    idle, busy, rest = (
        sessions_family(3, NODE),
        sessions_family(2, NODE, "busy"),
        module_info_family("0" * 16),
    )
    reader = RecordingReader()
    send_telemetry(
        reader, metrics_message(busy, rest), at=10.0
    )  # the idle sessions were sent before and missed
    send_telemetry(reader, metrics_message(busy, rest), at=11.0)  # from now on the idle sessions come last
    send_telemetry(reader, metrics_message(idle), at=11.1)
    send_telemetry(reader, metrics_message(busy, rest, idle), at=12.0)
    assert [report.session_counts for report in reader.reports[:1]] == [None]
    (session_counts,) = [
        report.session_counts for report in reader.reports if report.session_counts is not None
    ]
    assert dict(session_counts.sessions) == {NODE: 5}


def test_streams_are_separate_and_forgotten_at_their_end() -> None:
    reader = RecordingReader()
    send_telemetry(reader, metrics_message(*COUNTERS, *GAUGES, envoy="e"), at=10.0, first=True, number=1)
    reader.receive(peer_messages.encode_telemetry_end(1, 10.5), now=10.5)
    send_telemetry(
        reader,
        metrics_message(sessions_family(1, NODE), module_info_family(), envoy="e"),
        at=11.0,
        first=True,
        number=2,
    )
    assert reader.reports[-1].is_first
    assert reader.reports[-1].nodes[NODE].logins == 0
    send_telemetry(
        reader, metrics_message(*GAUGES), at=12.0, number=1
    )  # an ended number is an unknown stream
    assert len(reader.reports) == 2

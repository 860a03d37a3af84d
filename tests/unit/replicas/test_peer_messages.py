"""Messages between replicas: encoding and decoding, and metrics streams whose start the reader missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from envoy.service.load_stats.v3 import lrs_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config.statements import StatementSettings
from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.model.statements import COUNT
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.statements.collector import StatementCollector
from controlplane.replicas import peer_feed_pb2, peer_messages
from controlplane.replicas.merged_fleet import ReplicaFleet
from tests.support.controlplane.peer_sync import RecordedFacts
from tests.support.controlplane.running_xds import RecordedEvents
from tests.support.controlplane.statement_reports import digest_of, report_message, row
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
    has_acknowledged_endpoints=st.booleans(),
    group=texts,
    zone=texts,
    module_version=texts,
    problem=texts,
    streams=st.integers(0, 5),
    stale_resources=st.lists(texts, max_size=3).map(tuple),
    stale_settings=st.lists(texts, max_size=3).map(tuple),
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
    """Reads the messages of one peer, and records the facts, events and fleets in them."""

    def __init__(self) -> None:
        self.event_log = RecordedEvents()
        self.events = self.event_log.recorded_remote
        facts = RecordedFacts(self.event_log)
        self.loads, self.reports = facts.loads, facts.reports
        self.fleets: list[ReplicaFleet] = []
        metrics = MetricsService(facts.put_module_report, lambda: 0.0, known_nodes=lambda: {NODE})
        self.statements = StatementCollector(StatementSettings(digests="on"), lambda: 0.0)
        self._reader = peer_messages.PeerMessageReader(
            facts, self.event_log, metrics, self.statements, self.fleets.append
        )

    def receive(self, message: bytes, now: float = 0.0) -> None:
        self._reader.receive(message, now)


@given(fleets)
def test_fleet_round_trips(fleet: ReplicaFleet) -> None:
    reader = RecordingReader()
    reader.receive(peer_messages.encode_fleet(fleet, 0.0))
    assert reader.fleets == [fleet]


def test_times_are_converted_but_connected_since_only_the_first_time() -> None:
    def fleet(since: float | None) -> ReplicaFleet:
        return ReplicaFleet(
            (EnvoyStatus("e", "a", "v", "none", since, 1000.0, last_nack=Nack(900, "", "", "")),)
        )

    reader = RecordingReader()
    reader.receive(peer_messages.encode_fleet(fleet(950.0), 1000.0), now=5000.0)
    # This message was sent 1 s after the first, but received only 0.5 s after it: its delay was lower.
    reader.receive(peer_messages.encode_fleet(fleet(950.0), 1001.0), now=5000.5)
    reader.receive(peer_messages.encode_fleet(fleet(951.0), 1002.0), now=5002.0)
    reader.receive(peer_messages.encode_fleet(fleet(None), 1003.0), now=5002.5)
    (first, less_delayed, reconnected, ended) = [fleet.statuses[0] for fleet in reader.fleets]
    assert (first.connected_since, first.last_seen) == (4950.0, 5000.0)
    assert (less_delayed.connected_since, less_delayed.last_seen) == (4950.0, 4999.5)
    assert (reconnected.connected_since, ended.connected_since) == (4950.5, None)
    assert first.last_nack is not None
    assert first.last_nack.at == 4900.0


def test_forwarded_load_report_is_stored_as_the_load_of_its_envoy() -> None:
    report = lrs_pb2.LoadStatsRequest()
    cluster = report.cluster_stats.add(cluster_name="tidb-olap")
    stats = cluster.upstream_locality_stats.add().upstream_endpoint_stats.add(total_requests_in_progress=7)
    stats.address.socket_address.address = "10.0.0.1"
    stats.address.socket_address.port_value = 4000
    report.cluster_stats.add(cluster_name="tidevoy_control_plane")
    reader = RecordingReader()
    load_report = peer_feed_pb2.LoadReport(envoy="e", report=report.SerializeToString())
    reader.receive(peer_messages.encode_message(99.0, load_report=load_report), now=100.0)
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


def test_event_with_half_a_surrogate_pair_is_sent() -> None:
    # A JSON request may contain half a surrogate pair. An exception while forwarding would end the process.
    reader = RecordingReader()
    reader.receive(peer_messages.encode_event("audit.start_rollout", "a=\ud800", "m \ud800", {}, 0.0))
    assert reader.events == [("audit.start_rollout", "a=?", "m ?", {})]


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff",
        peer_messages.encode_message(0.0, load_report=peer_feed_pb2.LoadReport(report=b"\xff")),
        peer_messages.encode_message(0.0, event=peer_feed_pb2.Event(data="{")),
        peer_messages.encode_message(0.0, event=peer_feed_pb2.Event(data="[]")),
    ],
)
def test_invalid_message_raises_unreadable_message(message: bytes) -> None:
    with pytest.raises(peer_messages.UnreadableMessage):
        RecordingReader().receive(message)


@pytest.mark.parametrize("report", [b"\xff", report_message(row(), sequence=0).SerializeToString()])
def test_unreadable_report_of_statements_is_not_stored(report: bytes) -> None:
    reader = RecordingReader()
    statements = peer_feed_pb2.StatementReport(envoy="e", report=report)
    reader.receive(peer_messages.encode_message(0.0, statements=statements))
    assert not any(reader.statements.window(60).slots)


def test_messages_of_unknown_kinds_are_ignored() -> None:
    reader = RecordingReader()
    unknown_field = b"\xa2\x06\x01x"  # field number 100, which no kind of message has
    reader.receive(peer_messages.encode_message(1.0) + unknown_field)
    assert (reader.loads, reader.reports, reader.fleets, reader.events) == ([], [], [], [])


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
        telemetry = peer_feed_pb2.Telemetry(
            stream=number, envoy="e", message=message, first=first and index == 0
        )
        reader.receive(peer_messages.encode_message(at, telemetry=telemetry), now=at)


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
    assert second.session_counts.oldest_count_at == 9.0
    assert second.nodes[NODE].sessions == {"idle": 3, "transaction": 2}


@given(st.integers(0, len(FLUSH)))
def test_partial_flush_is_never_reported_as_complete(missed: int) -> None:
    """Each report has all counters, and either all session counts or none, whatever the reader missed."""
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


def test_partially_missed_flush_is_not_counted_even_if_the_order_changes() -> None:
    idle, busy, rest = (
        sessions_family(3, NODE),
        sessions_family(2, NODE, "busy"),
        module_info_family("0" * 16),
    )
    reader = RecordingReader()
    # The reader missed the start of this flush, with the idle sessions.
    send_telemetry(reader, metrics_message(busy, rest), at=10.0)
    send_telemetry(reader, metrics_message(busy, rest), at=11.0)  # this flush sends the idle sessions last
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
    reader.receive(peer_messages.encode_message(10.5, telemetry_ended=1), now=10.5)
    send_telemetry(
        reader,
        metrics_message(sessions_family(1, NODE), module_info_family(), envoy="e"),
        at=11.0,
        first=True,
        number=2,
    )
    assert reader.reports[-1].is_first
    assert reader.reports[-1].nodes[NODE].logins == 0
    # The reader has forgotten the number of the ended stream: this flush gives no report.
    send_telemetry(reader, metrics_message(*GAUGES), at=12.0, number=1)
    assert len(reader.reports) == 2


def test_statements_are_stored_once_for_their_envoy() -> None:
    reader = RecordingReader()
    report = report_message(row(1)).SerializeToString()
    for _ in range(2):
        statements = peer_feed_pb2.StatementReport(envoy="e", report=report)
        reader.receive(peer_messages.encode_message(0.0, statements=statements))
    (rows,) = reader.statements.window(60).slots
    assert [(key.digest, key.envoy, counts[COUNT]) for key, counts in rows.items()] == [
        (digest_of(1), "e", 1)
    ]

"""What replicas tell each other: bytes and back, and streams that are joined in their middle."""

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
    st.lists(statuses, max_size=4, unique_by=lambda each: each.id).map(tuple),
    st.one_of(st.none(), st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60))),
)


class Ear:
    """What was heard of one peer whose clock shows the same as ours."""

    def __init__(self) -> None:
        self.loads: list[EnvoyLoad] = []
        self.reports: list[ModuleReport] = []
        self.fleets: list[ReplicaFleet] = []
        self.events: list[tuple[str, str, str, Mapping[str, Any]]] = []
        recall = SeriesCache()
        self._hearing = peer_messages.PeerMessageReader(
            on_load=self.loads.append,
            on_report=self.reports.append,
            on_fleet=self.fleets.append,
            on_event=lambda *event: self.events.append(event),
            new_stream=lambda joined: TelemetryStream(lambda: {NODE}, recall, resumed_envoy=joined),
        )

    def hear(self, piece: bytes, now: float = 0.0) -> None:
        self._hearing.receive(piece, now)


@given(fleets)
def test_a_fleet_arrives_as_it_was_told(fleet: ReplicaFleet) -> None:
    ear = Ear()
    ear.hear(peer_messages.encode_fleet(fleet, 0.0))
    assert ear.fleets == [fleet]


def test_times_are_converted_but_a_connection_keeps_its_time() -> None:
    def told(since: float | None) -> ReplicaFleet:
        return ReplicaFleet(
            (EnvoyStatus("e", "a", "v", "none", since, 1000.0, last_nack=Nack(900, "", "", "")),)
        )

    ear = Ear()
    ear.hear(peer_messages.encode_fleet(told(950.0), 1000.0), now=5000.0)
    ear.hear(
        peer_messages.encode_fleet(told(950.0), 1001.0), now=5000.5
    )  # this one came half a second sooner
    ear.hear(peer_messages.encode_fleet(told(951.0), 1002.0), now=5002.0)
    ear.hear(peer_messages.encode_fleet(told(None), 1003.0), now=5002.5)
    (first, sooner, other, gone) = [each.statuses[0] for each in ear.fleets]
    assert (first.connected_since, first.last_seen) == (4950.0, 5000.0)
    assert (sooner.connected_since, sooner.last_seen) == (4950.0, 4999.5)
    assert (other.connected_since, gone.connected_since) == (4950.5, None)
    assert first.last_nack is not None
    assert first.last_nack.at == 4900.0


def test_a_load_report_is_read_as_at_the_replica_that_got_it() -> None:
    report = lrs_pb2.LoadStatsRequest()
    cluster = report.cluster_stats.add(cluster_name="tidb-olap")
    stats = cluster.upstream_locality_stats.add().upstream_endpoint_stats.add(total_requests_in_progress=7)
    stats.address.socket_address.address = "10.0.0.1"
    stats.address.socket_address.port_value = 4000
    report.cluster_stats.add(cluster_name="tidevoy_control_plane")
    ear = Ear()
    ear.hear(peer_messages.encode_load("e", 99.0, report.SerializeToString()), now=100.0)
    (load,) = ear.loads
    assert (load.envoy, load.at, dict(load.sessions)) == ("e", 100.0, {NODE: 7})


@given(texts, texts, texts, st.dictionaries(texts, st.one_of(texts, st.integers(-5, 5), st.booleans())))
def test_an_event_arrives_as_it_was_told(kind: str, subject: str, said: str, data: Mapping[str, Any]) -> None:
    ear = Ear()
    ear.hear(peer_messages.encode_event(kind, subject, said, data, 0.0))
    assert ear.events == [(kind, subject, said, data)]


def test_what_json_has_not_becomes_a_text() -> None:
    ear = Ear()
    ear.hear(peer_messages.encode_event("audit.drain", "n", "m", {"who": {1}}, 0.0))
    assert ear.events == [("audit.drain", "n", "m", {"who": "{1}"})]


@pytest.mark.parametrize(
    "piece",
    [
        b"\xff\xff",
        peer_feed_pb2.News(load=peer_feed_pb2.Load(report=b"\xff")).SerializeToString(),
        peer_feed_pb2.News(event=peer_feed_pb2.Event(data="{")).SerializeToString(),
        peer_feed_pb2.News(event=peer_feed_pb2.Event(data="[]")).SerializeToString(),
    ],
)
def test_what_cannot_be_read_is_said(piece: bytes) -> None:
    with pytest.raises(peer_messages.UnreadableMessage):
        Ear().hear(piece)


def test_what_a_later_version_tells_is_passed_over() -> None:
    ear = Ear()
    ear.hear(peer_feed_pb2.News(at=1.0).SerializeToString() + b"\xa2\x06\x01x")
    assert (ear.loads, ear.reports, ear.fleets, ear.events) == ([], [], [], [])


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("envoy.nack", True), ("audit.node_drain", True), ("node.state", False), ("replica.leads", False)],
)
def test_events_that_others_cannot_know_of_are_shared(kind: str, shared: bool) -> None:
    assert peer_messages.is_shared_event(kind) is shared


# --- metrics streams ---

COUNTERS = (
    metric_family("tidevoy.logins", 9, node=NODE),
    metric_family("tidevoy.commands", 5, node=NODE, kind="query"),
)
GAUGES = (sessions_family(3, NODE), module_info_family("0" * 16), sessions_family(2, NODE, "transaction"))
FLUSH = tuple(metrics_message(each) for each in (*COUNTERS, *GAUGES))  # one message for each family


def tell(ear: Ear, *parts: bytes, at: float, first: bool = False, number: int = 1) -> None:
    for index, part in enumerate(parts):
        ear.hear(peer_messages.encode_telemetry(number, "e", at, part, first=first and index == 0), now=at)


def test_a_stream_that_is_heard_from_its_beginning_is_as_our_own() -> None:
    ear = Ear()
    identified = (metrics_message(COUNTERS[0], envoy="e"), *FLUSH[1:])
    tell(ear, *identified, at=10.0, first=True)
    tell(ear, *FLUSH, at=11.0)
    first, second = ear.reports
    assert (first.envoy, first.is_first, first.session_counts) == ("e", True, None)
    assert first.nodes[NODE].logins == 9
    assert second.session_counts is not None
    assert dict(second.session_counts.sessions) == {NODE: 5}
    assert second.session_counts.counting_since == 9.0
    assert second.nodes[NODE].sessions == {"idle": 3, "transaction": 2}


@given(st.integers(0, len(FLUSH)))
def test_a_part_of_a_flush_never_passes_for_the_whole(missed: int) -> None:
    """Wherever a stream is joined, what is told first has all counters, and a census has all sessions."""
    ear = Ear()
    tell(ear, *FLUSH[missed:], at=10.0)
    for second in range(1, 4):
        tell(ear, *FLUSH, at=10.0 + second)
    assert [report.envoy for report in ear.reports] == ["e"] * len(ear.reports)
    assert [report.is_first for report in ear.reports[:2]] == [True, False]
    for report in ear.reports:
        assert report.nodes[NODE].logins == 9
        assert report.nodes[NODE].commands == {"query": 5}
        if report.session_counts is not None:
            assert dict(report.session_counts.sessions) == {NODE: 5}
            assert NODE in report.session_counts.complete_nodes or not report.session_counts.complete_nodes
    assert ear.reports[-1].session_counts is not None
    assert ear.reports[-1].session_counts.complete_nodes == {NODE}


def test_a_flush_that_was_missed_in_part_does_not_count_whatever_the_order_of_the_next() -> None:
    idle, busy, rest = (
        sessions_family(3, NODE),
        sessions_family(2, NODE, "busy"),
        module_info_family("0" * 16),
    )
    ear = Ear()
    tell(ear, metrics_message(busy, rest), at=10.0)  # before that, and unheard, came the idle ones
    tell(ear, metrics_message(busy, rest), at=11.0)  # which come behind it from now on
    tell(ear, metrics_message(idle), at=11.1)
    tell(ear, metrics_message(busy, rest, idle), at=12.0)
    assert [report.session_counts for report in ear.reports[:1]] == [None]
    (census,) = [report.session_counts for report in ear.reports if report.session_counts is not None]
    assert dict(census.sessions) == {NODE: 5}


def test_streams_are_told_apart_and_forgotten_at_their_end() -> None:
    ear = Ear()
    tell(ear, metrics_message(*COUNTERS, *GAUGES, envoy="e"), at=10.0, first=True, number=1)
    ear.hear(peer_messages.encode_telemetry_end(1, 10.5), now=10.5)
    tell(
        ear,
        metrics_message(sessions_family(1, NODE), module_info_family(), envoy="e"),
        at=11.0,
        first=True,
        number=2,
    )
    assert ear.reports[-1].is_first
    assert ear.reports[-1].nodes[NODE].logins == 0
    tell(
        ear, metrics_message(*GAUGES), at=12.0, number=1
    )  # a number that has ended is no stream that is known
    assert len(ear.reports) == 2

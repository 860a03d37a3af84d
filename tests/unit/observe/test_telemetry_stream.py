"""What is read of an Envoy's stats: hand-made messages, whole, in pieces, foreign, malformed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.traffic import Ejection, ModuleReport, SessionCounts, Traffic
from controlplane.observe.envoy_reports.telemetry_pb2 import LabelPair, MetricFamily, StreamMetricsMessage
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream, parse_message
from tests.support.controlplane.telemetry_messages import (
    all_families,
    metric_family,
    metrics_message,
    module_info_family,
    sessions_family,
    with_timestamp,
)

A, B = "10.0.0.1:4000", "[fd00::1]:4000"
KNOWN = frozenset((A, B))


def stream(known: frozenset[str] = KNOWN) -> TelemetryStream:
    return TelemetryStream(lambda: known)


def told(fed: TelemetryStream, *families: bytes, at: float = 1.0, envoy: str = "e1") -> ModuleReport:
    """A flush of one message; what is in it last counts."""
    report = fed.receive(metrics_message(module_info_family(), *families, envoy=envoy), at)
    assert report is not None
    return report


def heard(fed: TelemetryStream, *families: bytes, at: float = 1.0) -> SessionCounts | None:
    """What is known of sessions after a message, which is a part of a flush."""
    report = fed.receive(metrics_message(*families, envoy="e1"), at)
    return report.session_counts if report is not None else None


def logins(count: float, node: str = A) -> bytes:
    return metric_family("tidevoy.logins", count, node=node)


def test_an_ejection_is_reported_until_it_ends() -> None:
    def ejected(since: int, reason: str = "closed", node: str = A) -> bytes:
        return metric_family("tidevoy.ejected_since", since, gauge=True, node=node, reason=reason)

    fed = stream()
    assert told(fed).ejections == {}
    assert told(fed, ejected(1000)).ejections == {A: Ejection("e1", "closed", 1000)}
    # It was tried again and failed for another reason.
    report = told(fed, ejected(0), ejected(1000, "connect"), ejected(1001, node=B))
    assert report.ejections == {A: Ejection("e1", "connect", 1000), B: Ejection("e1", "closed", 1001)}
    report = told(fed, ejected(5, "whim"), ejected(5, node="10.9.9.9:4000"), ejected(0, "connect"))
    assert (report.ejections, report.dropped_series) == ({B: Ejection("e1", "closed", 1001)}, 2)
    assert not report.nodes


def test_every_family_has_its_place() -> None:
    report = told(stream(), *all_families(B))
    assert (report.envoy, report.at, report.version, report.dropped_series) == ("e1", 1.0, "0.1.0", 0)
    assert report.nodes == {
        B: Traffic(
            sessions={"idle": 3, "transaction": 2},
            not_movable={"transaction": 2},
            logins=9,
            login_failures={"denied": 4},
            connect_failures={"tls": 5},
            commands={"query": 100},
            latency_buckets=(0, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, 100),
            latency_sum_seconds=2.5,
            errors={"deadlock": 6},
            bytes={"to_node": 700},
            migrations={("moved", "ok"): 8, ("stayed", "slow"): 3},
            migration_buckets=(0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 8),
            migration_sum_seconds=0.04,
        ),
        "": Traffic(login_failures={"bad_packet": 1}),
    }


def test_only_the_first_message_names_the_envoy() -> None:
    fed = stream()
    assert told(fed, logins(1)).envoy == "e1"
    assert told(fed, logins(2), envoy="").envoy == "e1"
    assert told(fed, logins(3), envoy="someone-else").envoy == "e1"


def test_a_flush_in_several_messages_adds_up_and_later_values_replace_earlier_ones() -> None:
    fed = stream()
    assert fed.receive(metrics_message(logins(6), envoy="e1"), 1.0) is None
    assert fed.receive(metrics_message(sessions_family(5, A, "busy")), 1.0) is None
    report = told(fed, logins(1, B), envoy="")
    assert report.nodes == {A: Traffic(sessions={"busy": 5}, logins=6), B: Traffic(logins=1)}
    # What comes behind `module_info` is told with the next one.
    assert fed.receive(metrics_message(sessions_family(0, A, "busy")), 1.0) is None
    report = told(fed, logins(7), envoy="")
    assert report.nodes == {A: Traffic(sessions={"busy": 0}, logins=7), B: Traffic(logins=1)}


def test_a_report_is_never_changed_afterwards() -> None:
    fed = stream()
    first = told(fed, *all_families(A))
    told(fed, logins(1000), metric_family("tidevoy.sessions", 1000, node=A, state="idle"))
    assert (first.nodes[A].logins, first.nodes[A].sessions["idle"]) == (9, 3)


def test_an_envoy_without_the_module_tells_nothing() -> None:
    fed = stream()
    others = [
        metric_family("cluster.upstream_cx_total", 3, cluster="tidevoy.sessions"),
        metric_family("server.uptime", 1, gauge=True),
        metric_family("my.tidevoy.logins", 1, node=A),
        metric_family("logins", 1, node=A, cluster="tidevoy."),
    ]
    assert fed.receive(metrics_message(*others, envoy="e1"), 1.0) is None
    assert fed.envoy == "e1"


def test_unknown_families_and_labels_are_passed_over_without_counting_them() -> None:
    extra = metric_family("tidevoy.logins", 4, node=A, zone="new")
    report = told(stream(), extra, metric_family("tidevoy.of_a_newer_module", 1, node=A))
    assert report.nodes == {A: Traffic(logins=4)}
    assert report.dropped_series == 0


@pytest.mark.parametrize(
    "series",
    [
        metric_family("tidevoy.sessions", 1, gauge=True, node=A, state="asleep"),
        metric_family("tidevoy.sessions", 1, gauge=True, node=A),
        metric_family("tidevoy.sessions", 1, gauge=True, node="10.9.9.9:4000", state="idle"),
        metric_family("tidevoy.command_seconds_bucket", 1, node=A, le="0.3"),
        metric_family("tidevoy.migrations", 1, node=A, result="moved", reason="slow"),
        metric_family("tidevoy.migrations", 1, node=A, result="moved"),
        logins(-1),
        logins(math.nan),
        logins(math.inf),
        logins(1e300),
        b"\x0a\x0etidevoy.logins\x22\xff",  # says that more follows
        b"\x0a\x0ctidevoy.\xff\xfe\x00\x01",  # no UTF-8
        MetricFamily(name="tidevoy.logins", metric=[{"label": [b"\xff"]}]).SerializeToString(),
    ],
)
def test_what_cannot_be_used_is_left_out_and_counted(series: bytes) -> None:
    report = told(stream(), series, logins(2, B))
    assert report.nodes == {B: Traffic(logins=2)}
    assert report.dropped_series == 1


def test_a_message_that_is_none_is_counted_and_forgiven() -> None:
    fed = stream()
    assert fed.receive(b"\xff\xff", 1.0) is None
    assert fed.envoy == ""
    told(fed, logins(1))
    assert fed.receive(b"\x0a\xff", 2.0) is None
    report = told(fed)
    assert (report.nodes, report.dropped_series) == ({A: Traffic(logins=1)}, 2)


def test_nodes_that_are_forgotten_are_forgotten_here_too() -> None:
    known = set(KNOWN)
    fed = TelemetryStream(lambda: frozenset(known))
    told(
        fed, logins(1, A), logins(2, B), metric_family("tidevoy.login_failures", 1, node="", reason="no_node")
    )
    known.remove(A)
    report = told(fed, logins(1, A), logins(2, B), envoy="")
    assert set(report.nodes) == {B, ""}
    assert report.dropped_series == 1


def test_refusals_are_bounded_in_number_and_length() -> None:
    fed = stream()
    texts = [
        metric_family("tidevoy.config_refusals", 1, extension="session", text=f"{n} " + "x" * 10_000)
        for n in range(40)
    ]
    report = told(fed, *texts)
    assert len(report.rejections) == 16
    assert {len(text) for _, text in report.rejections} == {500}
    assert report.dropped_series == 24
    assert told(fed, *texts[:16], envoy="").rejections == report.rejections


def test_a_refusal_that_never_was_is_none() -> None:
    refused = metric_family("tidevoy.config_refusals", 0, extension="session", text="nothing")
    assert told(stream(), refused, logins(1)).rejections == {}


def test_several_series_in_one_family_count_too() -> None:
    both = MetricFamily.FromString(logins(1, A))
    both.metric.append(MetricFamily.FromString(logins(2, B)).metric[0])
    assert {node: part.logins for node, part in told(stream(), both.SerializeToString()).nodes.items()} == {
        A: 1,
        B: 2,
    }


def bucket(count: int, le: str = "+Inf") -> bytes:
    return metric_family("tidevoy.command_seconds_bucket", count, node=A, le=le)


def test_buckets_never_fall_from_one_bound_to_the_next() -> None:
    buckets = told(stream(), bucket(10, "0.01"), bucket(9, "0.025"), bucket(12)).nodes[A].latency_buckets
    assert buckets == (0, 0, 0, 0, 10, 10, 10, 10, 10, 10, 10, 10, 10, 12)


def test_recent_commands_are_those_of_the_last_minute_or_two() -> None:
    fed = stream()

    def recent(count: int, at: float) -> int:
        return told(fed, bucket(count), at=at).nodes[A].recent_latency_buckets[-1]

    assert recent(1000, 0.0) == 0  # of how long ago, nobody knows
    assert recent(1000, 0.5) == 0  # the rest of that flush
    assert recent(1010, 5.0) == 0  # the baseline
    assert recent(1020, 10.0) == 10
    assert recent(1030, 65.0) == 20  # the second baseline
    assert recent(1040, 124.9) == 30
    assert recent(1050, 125.0) == 20  # the first is gone
    assert recent(7, 130.0) == 0  # a count that falls says nothing, and is no reason to stop


def test_a_flush_is_reported_with_what_it_has_once() -> None:
    """Envoy tells all counters of a flush before that."""
    fed = stream()

    def reports(*families: bytes) -> list[bool]:
        report = fed.receive(metrics_message(*families, envoy="e1"), 5.0)
        return [report.is_first] if report is not None else []

    assert reports(logins(1)) == []
    assert reports(logins(1, B), module_info_family(), sessions_family(1, A)) == [True]
    assert reports(sessions_family(1, B)) == reports(logins(2)) == []
    assert reports(module_info_family()) == [False]


@pytest.mark.parametrize(
    ("said", "instance"),
    [
        ("00c0ffee00c0ffee", "00c0ffee00c0ffee"),
        ("", ""),
        ("00C0FFEE00C0FFEE", ""),
        ("0" * 17, ""),
        ("x,y=1:2", ""),
    ],
)
def test_an_envoys_process_is_known_by_sixteen_digits(said: str, instance: str) -> None:
    fed = stream()
    told(fed, module_info_family(instance=said))
    report = told(fed, module_info_family(instance=said))
    assert report.instance == instance
    assert report.session_counts is not None
    assert report.session_counts.instance == instance
    assert told(stream(), module_info_family()).instance == ""  # as an older module tells it


def test_sessions_are_known_when_all_stats_have_come() -> None:
    fed = stream()
    assert heard(fed, sessions_family(2, A), at=10.0) is None
    assert heard(fed, module_info_family(), at=10.25) is None
    assert heard(fed, sessions_family(5, A, "busy"), at=10.5) is None  # the rest of the first flush
    assert heard(fed, sessions_family(2, A), at=11.0) is None
    whole = heard(fed, module_info_family(), at=11.25)
    assert whole is not None
    # What came in the same flush before its first `module_info` may be older than that, but not by much.
    assert (whole.at, whole.counting_since) == (11.25, 9.25)
    assert (whole.sessions, whole.complete_nodes, whole.has_served) == ({A: 7}, KNOWN, True)
    assert heard(fed, sessions_family(0, A, "busy"), at=11.5) is None
    later = heard(fed, sessions_family(2, A), module_info_family(), at=12.25)
    assert later == SessionCounts(12.25, 10.25, {A: 2}, KNOWN)
    last = heard(fed, module_info_family(), sessions_family(0, A), sessions_family(1, B), at=13.0)
    assert last == SessionCounts(13.0, 11.25, {B: 1}, KNOWN)


@pytest.mark.parametrize("ahead", [0.0, 5000.0, -1e9])
def test_flushes_that_waited_for_us_keep_their_age(ahead: float) -> None:
    """Whatever the Envoy's clock says: else a zero of before would pass for a new one."""
    fed = stream()

    def at_once(made: float, at: float) -> SessionCounts:
        census = heard(fed, with_timestamp(sessions_family(0, A), made + ahead), module_info_family(), at=at)
        assert census is not None
        return census

    heard(fed, with_timestamp(sessions_family(0, A), 2e9 + ahead), module_info_family(), at=2e9)
    assert at_once(2e9 + 1, 2e9 + 1).at == 2e9 + 1
    for second in (2, 3, 4):  # all of them read when we are awake again
        late = at_once(2e9 + second, 2e9 + 60)
        assert (late.at, late.counting_since) == (2e9 + second, 2e9 + second - 2)
    assert at_once(2e9 + 61, 2e9 + 61).at == 2e9 + 61


def test_a_module_that_never_had_a_session_says_so() -> None:
    fed = stream()
    told(fed, module_info_family())
    unused = told(fed, module_info_family()).session_counts
    assert unused is not None
    assert (unused.has_served, unused.sessions) == (False, {})
    turned_away = metric_family("tidevoy.login_failures", 1, node="", reason="no_node")
    used = told(fed, turned_away).session_counts
    assert used is not None
    assert (used.has_served, used.sessions) == (True, {})
    # Not even what is said of nodes that nobody knows leaves it unused.
    strange = stream()
    told(strange, module_info_family(), sessions_family(1, "10.9.9.9:4000"))
    known = told(strange, module_info_family()).session_counts
    assert known is not None
    assert (known.has_served, known.sessions) == (True, {})


def test_a_node_that_was_unknown_for_a_while_is_not_covered() -> None:
    known = set(KNOWN)
    fed = TelemetryStream(lambda: frozenset(known))

    def covered(*families: bytes) -> object:
        census = heard(fed, *families)
        return census and census.complete_nodes

    assert covered(module_info_family(), sessions_family(1, A)) is None
    assert covered(module_info_family(), sessions_family(1, A)) == {A, B}
    known.remove(A)
    assert covered(sessions_family(1, A)) is None
    known.add(A)
    assert covered(module_info_family()) == {B}
    assert covered(module_info_family()) == {B}  # its series may have stood before that, and were left out
    assert covered(module_info_family(), sessions_family(1, A)) == {A, B}


def test_a_node_with_sessions_in_an_unknown_state_is_not_covered() -> None:
    fed = stream()
    for _ in range(3):
        census = told(
            fed, module_info_family(), sessions_family(1, A, "asleep"), sessions_family(0, B, "asleep")
        ).session_counts
    assert census is not None
    assert (census.sessions, census.complete_nodes) == ({}, {B})


def test_what_could_not_be_read_may_have_been_sessions() -> None:
    fed = stream()
    for _ in range(2):
        whole = told(fed, module_info_family(), sessions_family(1, A))
    assert whole.session_counts is not None
    assert heard(fed, sessions_family(-1, A)) is None
    assert told(fed, module_info_family(), sessions_family(1, A)).session_counts is None
    assert told(fed, module_info_family(), sessions_family(1, A)).session_counts is not None


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 3)), max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 6),
)
def test_a_first_flush_in_any_pieces_never_makes_a_node_look_empty(
    counts: list[tuple[str, int]], pieces: list[int], place: int
) -> None:
    """From the first census on it holds what the flush had, wherever its pieces end."""
    last = {(node, f"{index}"): count for index, (node, count) in enumerate(counts)}
    states = ("login", "idle", "busy", "transaction", "opaque")
    latest = {(node, states[int(index) % 5]): count for (node, index), count in last.items()}
    flush = [sessions_family(count, node, state) for (node, state), count in latest.items()]
    flush.insert(min(place, len(flush)), module_info_family())
    expected: dict[str, int] = {}
    for (node, _), count in latest.items():
        expected[node] = expected.get(node, 0) + count
    fed, at, censuses = stream(), 0.0, 0
    for _ in range(2):
        rest = list(flush)
        for size in [*pieces, len(flush)]:
            part, rest = rest[:size], rest[size:]
            at += 0.1
            if (census := heard(fed, *part, at=at)) is not None:
                assert census.sessions == {n: count for n, count in expected.items() if count}
                censuses += 1
    assert censuses == 1


@pytest.mark.parametrize("prefix", ["cluster.", "tidevoy."])
def test_any_prefix_can_be_read(prefix: str) -> None:
    first = metric_family("cluster.a", 1, cluster="tidb")
    reading = parse_message(
        metrics_message(first, metric_family("tidevoy.b", 2, gauge=True), envoy="e1"), prefix
    )
    assert reading.envoy == "e1"
    assert [(one.name, dict(one.labels), one.value) for one in reading.series] == [
        {"cluster.": ("cluster.a", {"envoy.cluster_name": "tidb"}, 1), "tidevoy.": ("tidevoy.b", {}, 2)}[
            prefix
        ]
    ]


@given(st.binary(max_size=200))
def test_no_message_is_fatal(data: bytes) -> None:
    stream().receive(data, 1.0)


@given(st.lists(st.binary(max_size=60).map(lambda tail: b"\x0a\x0etidevoy.logins" + tail), max_size=5))
def test_no_family_is_fatal(families: list[bytes]) -> None:
    fed = stream()
    fed.receive(metrics_message(*families, envoy="e1"), 1.0)
    assert set(told(fed, logins(5, B), envoy="").nodes) >= {B}


def test_what_is_read_is_what_the_protocol_says() -> None:
    """Bytes written down by hand from the field numbers, so that a slip in our own file shows."""
    label = b"\x0a\x04node\x12\x0d10.0.0.1:4000"
    metric = b"\x0a" + bytes([len(label)]) + label + b"\x1a\x09\x09" + b"\x00\x00\x00\x00\x00\x00\x08\x40"
    metric += b"\x30\x80\x01"  # a time stamp
    one = b"\x0a\x0etidevoy.logins\x18\x00\x22" + bytes([len(metric)]) + metric
    whole = b"\x0a\x07\x0a\x05\x0a\x03e-7" + b"\x12" + bytes([len(one)]) + one
    fed = stream()
    assert fed.receive(whole, 1.0) is None
    report = told(fed, envoy="")
    assert (report.envoy, report.nodes) == ("e-7", {A: Traffic(logins=3)})
    assert LabelPair.FromString(label).value == A
    assert StreamMetricsMessage.FromString(whole).identifier.node.id == "e-7"

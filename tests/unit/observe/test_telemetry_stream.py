"""Parsing of an Envoy's stats from hand-written messages: complete, partial, unrelated and malformed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.capture import CaptureCounts
from controlplane.model.limits import LimitUsage
from controlplane.model.rules import RuleHits
from controlplane.model.traffic import Ejection, LogCounts, ModuleReport, SessionCounts, Traffic
from controlplane.observe.envoy_reports.telemetry_pb2 import LabelPair, MetricFamily, StreamMetricsMessage
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from tests.support.controlplane.telemetry_messages import (
    all_families,
    metric_family,
    metrics_message,
    module_info_family,
    sessions_family,
    with_timestamp,
)

A, B = "10.0.0.1:4000", "[fd00::1]:4000"
KNOWN_NODES = frozenset((A, B))


def new_stream(known_nodes: frozenset[str] = KNOWN_NODES) -> TelemetryStream:
    return TelemetryStream(lambda: known_nodes)


def flush(stream: TelemetryStream, *families: bytes, at: float = 1.0, envoy: str = "e1") -> ModuleReport:
    """Receive a flush of one message and return its report."""
    report = stream.receive(metrics_message(module_info_family(), *families, envoy=envoy), at)
    assert report is not None
    return report


def counts_after(stream: TelemetryStream, *families: bytes, at: float = 1.0) -> SessionCounts | None:
    """Receive one message of a flush and return the session counts of the report that it causes."""
    report = stream.receive(metrics_message(*families, envoy="e1"), at)
    return report.session_counts if report is not None else None


def logins(count: float, node: str = A) -> bytes:
    return metric_family("tidevoy.logins", count, node=node)


def test_ejection_is_reported_until_it_ends() -> None:
    def ejected(since: int, reason: str = "closed", node: str = A) -> bytes:
        return metric_family("tidevoy.ejected_since", since, gauge=True, node=node, reason=reason)

    stream = new_stream()
    assert flush(stream).ejections == {}
    assert flush(stream, ejected(1000)).ejections == {A: Ejection("e1", "closed", 1000)}
    # The Envoy tried the node again and ejected it for another reason.
    report = flush(stream, ejected(0), ejected(1000, "connect"), ejected(1001, node=B))
    assert report.ejections == {A: Ejection("e1", "connect", 1000), B: Ejection("e1", "closed", 1001)}
    report = flush(
        stream, ejected(5, "unknown reason"), ejected(5, node="10.9.9.9:4000"), ejected(0, "connect")
    )
    assert (report.ejections, report.dropped_series) == ({B: Ejection("e1", "closed", 1001)}, 2)
    assert not report.nodes


def test_parts_that_envoys_runtime_switches_off_are_reported() -> None:
    def switch(part: str, value: int, by: str = "runtime") -> bytes:
        return metric_family("tidevoy.switched_off", value, gauge=True, part=part, by=by)

    stream, both = new_stream(), frozenset({"offload", "migration"})
    report = flush(
        stream, switch("offload", 0), switch("migration", 1), switch("offload", 1, "control_plane")
    )
    assert report.runtime_off == frozenset({"migration"})
    assert flush(stream).runtime_off == frozenset({"migration"})
    report = flush(stream, switch("offload", 1), switch("speed", 1))
    assert (report.runtime_off, report.dropped_series) == (both, 1)
    assert flush(stream, switch("offload", 0), switch("migration", 0)).runtime_off == frozenset()


@pytest.mark.parametrize("log", ["login_log", "statement_log"])
def test_counts_of_a_log_are_reported_once_the_log_is_on(log: str) -> None:
    def lines(result: str, value: int) -> bytes:
        return metric_family(f"tidevoy.{log}_lines", value, result=result)

    stream = new_stream()
    assert flush(stream).logs == {}
    assert flush(stream, lines("written", 0)).logs == {log: LogCounts()}
    errors = metric_family(f"tidevoy.{log}_write_errors", 2)
    report = flush(stream, lines("written", 7), lines("dropped", 3), errors, lines("lost", 1))
    assert (report.logs, report.dropped_series) == ({log: LogCounts(7, 3, 2)}, 1)
    assert flush(stream, lines("written", 8)).logs == {log: LogCounts(8, 3, 2)}
    later = metric_family("tidevoy.other_log_lines", 1, result="written")
    assert flush(stream, later).dropped_series == report.dropped_series


def test_counts_of_a_capture_begin_again_with_the_next_one() -> None:
    def gauges(**values: int) -> list[bytes]:
        return [metric_family(f"tidevoy.capture_{name}", value, gauge=True) for name, value in values.items()]

    stream = new_stream()
    assert flush(stream).capture is None
    first = gauges(until=5000, active=1, records=7, dropped=3, filtered=2, bytes=900, write_errors=1)
    assert flush(stream, *first).capture == CaptureCounts(5000, True, 7, 3, 2, 900, 1)
    assert flush(stream, *gauges(active=0, records=8)).capture == CaptureCounts(5000, False, 8, 3, 2, 900, 1)
    # The end of a flush of the capture before does not count for the next one.
    assert flush(stream, *gauges(until=6000)).capture == CaptureCounts(6000)
    report = flush(stream, *gauges(records=1, active=1, until=6000, lost=4))
    assert (report.capture, report.dropped_series) == (CaptureCounts(6000, True, records=1), 0)


def test_hits_of_rules_are_reported() -> None:
    def hits(value: int, rule: str = "no-sleep", dry_run: str = "false") -> bytes:
        return metric_family("tidevoy.rule_hits", value, rule=rule, dry_run=dry_run)

    stream = TelemetryStream(lambda: {A, B})
    assert flush(stream).rule_hits == {}
    report = flush(stream, hits(3), hits(5, dry_run="true"), hits(1, rule=""))
    assert report.rule_hits == {"no-sleep": RuleHits(3, 5)}
    assert flush(stream, hits(4)).rule_hits == {"no-sleep": RuleHits(4, 5)}


def test_use_of_limits_is_reported_by_rule() -> None:
    def limit(name: str, value: int, rule: str = "reporting") -> bytes:
        return metric_family(f"tidevoy.limit_{name}", value, gauge=name != "refusals", rule=rule)

    stream = new_stream()
    assert flush(stream).limits == {}
    report = flush(
        stream, limit("connections", 7), limit("quota", 9), limit("over_quota", 1), limit("refusals", 3)
    )
    assert report.limits == {"reporting": LimitUsage(7, 9, True, 3)}
    report = flush(stream, limit("over_quota", 0), limit("connections", 1, "total"), limit("quota", 1, ""))
    assert report.limits == {"reporting": LimitUsage(7, 9, False, 3), "total": LimitUsage(1)}
    assert report.dropped_series == 1
    assert flush(stream, limit("quota", 5)).limits["reporting"].quota == 9, "the larger one of the last two"
    assert flush(stream).limits["reporting"].quota == 5
    report = flush(stream, *(limit("connections", 1, f"rule-{number}") for number in range(1_500)))
    assert (len(report.limits), report.dropped_series) == (1_000, 1 + 502)


def test_every_family_is_parsed() -> None:
    report = flush(new_stream(), *all_families(B))
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
            migrations={("moved", "ok"): 8, ("failed", "slow"): 3},
            migration_buckets=(0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 8),
            migration_sum_seconds=0.04,
        ),
        "": Traffic(login_failures={"bad_packet": 1}),
    }


def test_only_the_first_message_names_the_envoy() -> None:
    stream = new_stream()
    assert flush(stream, logins(1)).envoy == "e1"
    assert flush(stream, logins(2), envoy="").envoy == "e1"
    assert flush(stream, logins(3), envoy="someone-else").envoy == "e1"


def test_flush_of_several_messages_is_combined() -> None:
    stream = new_stream()
    assert stream.receive(metrics_message(logins(6), envoy="e1"), 1.0) is None
    assert stream.receive(metrics_message(sessions_family(5, A, "busy")), 1.0) is None
    report = flush(stream, logins(1, B), envoy="")
    assert report.nodes == {A: Traffic(sessions={"busy": 5}, logins=6), B: Traffic(logins=1)}
    # Series after `module_info` are in the next report.
    assert stream.receive(metrics_message(sessions_family(0, A, "busy")), 1.0) is None
    report = flush(stream, logins(7), envoy="")
    assert report.nodes == {A: Traffic(sessions={"busy": 0}, logins=7), B: Traffic(logins=1)}


def test_reports_are_immutable() -> None:
    stream = new_stream()
    first = flush(stream, *all_families(A))
    flush(stream, logins(1000), metric_family("tidevoy.sessions", 1000, node=A, state="idle"))
    assert (first.nodes[A].logins, first.nodes[A].sessions["idle"]) == (9, 3)


def test_envoy_without_the_module_gives_no_report() -> None:
    stream = new_stream()
    others = [
        metric_family("cluster.upstream_cx_total", 3, cluster="tidevoy.sessions"),
        metric_family("server.uptime", 1, gauge=True),
        metric_family("my.tidevoy.logins", 1, node=A),
        metric_family("logins", 1, node=A, cluster="tidevoy."),
    ]
    assert stream.receive(metrics_message(*others, envoy="e1"), 1.0) is None
    assert stream.envoy == "e1"


def test_unknown_families_and_labels_are_ignored_uncounted() -> None:
    extra = metric_family("tidevoy.logins", 4, node=A, zone="new")
    report = flush(new_stream(), extra, metric_family("tidevoy.of_a_newer_module", 1, node=A))
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
        b"\x0a\x0etidevoy.logins\x22\xff",  # claims that more bytes follow
        b"\x0a\x0ctidevoy.\xff\xfe\x00\x01",  # not UTF-8
        MetricFamily(name="tidevoy.logins", metric=[{"label": [b"\xff"]}]).SerializeToString(),
    ],
)
def test_unusable_series_are_dropped_and_counted(series: bytes) -> None:
    report = flush(new_stream(), series, logins(2, B))
    assert report.nodes == {B: Traffic(logins=2)}
    assert report.dropped_series == 1


def test_malformed_message_is_counted_and_skipped() -> None:
    stream = new_stream()
    assert stream.receive(b"\xff\xff", 1.0) is None
    assert stream.envoy == ""
    flush(stream, logins(1))
    assert stream.receive(b"\x0a\xff", 2.0) is None
    report = flush(stream)
    assert (report.nodes, report.dropped_series) == ({A: Traffic(logins=1)}, 2)


def test_forgotten_nodes_are_removed() -> None:
    known_nodes = set(KNOWN_NODES)
    stream = TelemetryStream(lambda: frozenset(known_nodes))
    flush(
        stream,
        logins(1, A),
        logins(2, B),
        metric_family("tidevoy.login_failures", 1, node="", reason="no_node"),
    )
    known_nodes.remove(A)
    report = flush(stream, logins(1, A), logins(2, B), envoy="")
    assert set(report.nodes) == {B, ""}
    assert report.dropped_series == 1


def test_config_rejections_are_bounded_in_number_and_length() -> None:
    stream = new_stream()
    texts = [
        metric_family("tidevoy.config_refusals", 1, extension="session", text=f"{n} " + "x" * 10_000)
        for n in range(40)
    ]
    report = flush(stream, *texts)
    assert len(report.rejections) == 16
    assert {len(text) for _, text in report.rejections} == {500}
    assert report.dropped_series == 24
    assert flush(stream, *texts[:16], envoy="").rejections == report.rejections


def test_config_rejection_with_count_zero_is_ignored() -> None:
    rejected = metric_family("tidevoy.config_refusals", 0, extension="session", text="nothing")
    assert flush(new_stream(), rejected, logins(1)).rejections == {}


def test_family_may_have_several_series() -> None:
    both = MetricFamily.FromString(logins(1, A))
    both.metric.append(MetricFamily.FromString(logins(2, B)).metric[0])
    assert {
        node: part.logins for node, part in flush(new_stream(), both.SerializeToString()).nodes.items()
    } == {
        A: 1,
        B: 2,
    }


def bucket(count: int, le: str = "+Inf") -> bytes:
    return metric_family("tidevoy.command_seconds_bucket", count, node=A, le=le)


def test_buckets_never_decrease() -> None:
    buckets = flush(new_stream(), bucket(10, "0.01"), bucket(9, "0.025"), bucket(12)).nodes[A].latency_buckets
    assert buckets == (0, 0, 0, 0, 10, 10, 10, 10, 10, 10, 10, 10, 10, 12)


def test_recent_commands_cover_one_to_two_minutes() -> None:
    stream = new_stream()

    def recent(count: int, at: float) -> int:
        return flush(stream, bucket(count), at=at).nodes[A].recent_latency_buckets[-1]

    assert recent(1000, 0.0) == 0  # the age of these commands is unknown
    assert recent(1000, 0.5) == 0  # still the first flush
    assert recent(1010, 5.0) == 0  # the first baseline
    assert recent(1020, 10.0) == 10
    assert recent(1030, 65.0) == 20  # the second baseline
    assert recent(1040, 124.9) == 30
    assert recent(1050, 125.0) == 20  # the first baseline is dropped
    assert recent(7, 130.0) == 0  # a counter that decreases gives zero, not an error


def test_each_flush_gives_one_report() -> None:
    """The report comes with `module_info`, which Envoy sends after all counters of a flush."""
    stream = new_stream()

    def reports(*families: bytes) -> list[bool]:
        report = stream.receive(metrics_message(*families, envoy="e1"), 5.0)
        return [report.is_first] if report is not None else []

    assert reports(logins(1)) == []
    assert reports(logins(1, B), module_info_family(), sessions_family(1, A)) == [True]
    assert reports(sessions_family(1, B)) == reports(logins(2)) == []
    assert reports(module_info_family()) == [False]


@pytest.mark.parametrize(
    ("label", "instance"),
    [
        ("00c0ffee00c0ffee", "00c0ffee00c0ffee"),
        ("", ""),
        ("00C0FFEE00C0FFEE", ""),
        ("0" * 17, ""),
        ("x,y=1:2", ""),
    ],
)
def test_instance_must_have_sixteen_hex_digits(label: str, instance: str) -> None:
    stream = new_stream()
    flush(stream, module_info_family(instance=label))
    report = flush(stream, module_info_family(instance=label))
    assert report.instance == instance
    assert report.session_counts is not None
    assert report.session_counts.instance == instance
    assert flush(new_stream(), module_info_family()).instance == ""  # older modules report no instance


def test_session_counts_exist_once_all_stats_have_arrived() -> None:
    stream = new_stream()
    assert counts_after(stream, sessions_family(2, A), at=10.0) is None
    assert counts_after(stream, module_info_family(), at=10.25) is None
    assert counts_after(stream, sessions_family(5, A, "busy"), at=10.5) is None  # the rest of the first flush
    assert counts_after(stream, sessions_family(2, A), at=11.0) is None
    first = counts_after(stream, module_info_family(), at=11.25)
    assert first is not None
    # Series of a flush may be older than its `module_info`. The parser allows for 1 s.
    assert (first.at, first.oldest_count_at) == (11.25, 9.25)
    assert (first.sessions, first.complete_nodes, first.has_counted_sessions) == ({A: 7}, KNOWN_NODES, True)
    assert counts_after(stream, sessions_family(0, A, "busy"), at=11.5) is None
    later = counts_after(stream, sessions_family(2, A), module_info_family(), at=12.25)
    assert later == SessionCounts(12.25, 10.25, {A: 2}, KNOWN_NODES)
    last = counts_after(stream, module_info_family(), sessions_family(0, A), sessions_family(1, B), at=13.0)
    assert last == SessionCounts(13.0, 11.25, {B: 1}, KNOWN_NODES)


@pytest.mark.parametrize("ahead", [0.0, 5000.0, -1e9])
def test_delayed_flushes_keep_their_age(ahead: float) -> None:
    """A late count of zero must keep its age, whatever the offset of the Envoy's clock."""
    stream = new_stream()

    def receive(sent_at: float, at: float) -> SessionCounts:
        sessions = with_timestamp(sessions_family(0, A), sent_at + ahead)
        counts = counts_after(stream, sessions, module_info_family(), at=at)
        assert counts is not None
        return counts

    counts_after(stream, with_timestamp(sessions_family(0, A), 2e9 + ahead), module_info_family(), at=2e9)
    assert receive(2e9 + 1, 2e9 + 1).at == 2e9 + 1
    for second in (2, 3, 4):  # these messages are read after a stall of this process
        late = receive(2e9 + second, 2e9 + 60)
        assert (late.at, late.oldest_count_at) == (2e9 + second, 2e9 + second - 2)
    assert receive(2e9 + 61, 2e9 + 61).at == 2e9 + 61


def test_module_without_sessions_has_not_served() -> None:
    stream = new_stream()
    flush(stream, module_info_family())
    unused = flush(stream, module_info_family()).session_counts
    assert unused is not None
    assert (unused.has_counted_sessions, unused.sessions) == (False, {})
    failed_login = metric_family("tidevoy.login_failures", 1, node="", reason="no_node")
    used = flush(stream, failed_login).session_counts
    assert used is not None
    assert (used.has_counted_sessions, used.sessions) == (True, {})
    # Sessions on unknown nodes also prove that the module has served.
    other_stream = new_stream()
    flush(other_stream, module_info_family(), sessions_family(1, "10.9.9.9:4000"))
    used = flush(other_stream, module_info_family()).session_counts
    assert used is not None
    assert (used.has_counted_sessions, used.sessions) == (True, {})


def test_temporarily_unknown_node_is_incomplete() -> None:
    known_nodes = set(KNOWN_NODES)
    stream = TelemetryStream(lambda: frozenset(known_nodes))

    def complete_nodes(*families: bytes) -> object:
        counts = counts_after(stream, *families)
        return counts and counts.complete_nodes

    assert complete_nodes(module_info_family(), sessions_family(1, A)) is None
    assert complete_nodes(module_info_family(), sessions_family(1, A)) == {A, B}
    known_nodes.remove(A)
    assert complete_nodes(sessions_family(1, A)) is None
    known_nodes.add(A)
    assert complete_nodes(module_info_family()) == {B}
    assert complete_nodes(module_info_family()) == {B}  # earlier series of A may have been dropped
    assert complete_nodes(module_info_family(), sessions_family(1, A)) == {A, B}


def test_node_with_sessions_in_an_unknown_state_is_incomplete() -> None:
    stream = new_stream()
    for _ in range(3):
        counts = flush(
            stream, module_info_family(), sessions_family(1, A, "asleep"), sessions_family(0, B, "asleep")
        ).session_counts
    assert counts is not None
    assert (counts.sessions, counts.complete_nodes) == ({}, {B})


def test_unreadable_series_reset_the_session_counts() -> None:
    stream = new_stream()
    for _ in range(2):
        report = flush(stream, module_info_family(), sessions_family(1, A))
    assert report.session_counts is not None
    assert counts_after(stream, sessions_family(-1, A)) is None
    assert flush(stream, module_info_family(), sessions_family(1, A)).session_counts is None
    assert flush(stream, module_info_family(), sessions_family(1, A)).session_counts is not None


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 3)), max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 6),
)
def test_first_session_counts_contain_the_whole_first_flush(
    counts: list[tuple[str, int]], message_sizes: list[int], info_position: int
) -> None:
    """The counts are the same however the flush is split into messages."""
    states = ("login", "idle", "busy", "transaction", "opaque")
    latest = {(node, states[index % 5]): count for index, (node, count) in enumerate(counts)}
    families = [sessions_family(count, node, state) for (node, state), count in latest.items()]
    families.insert(min(info_position, len(families)), module_info_family())
    expected: dict[str, int] = {}
    for (node, _), count in latest.items():
        expected[node] = expected.get(node, 0) + count
    stream, at, reports = new_stream(), 0.0, 0
    for _ in range(2):
        remaining = list(families)
        for size in [*message_sizes, len(families)]:
            message, remaining = remaining[:size], remaining[size:]
            at += 0.1
            if (session_counts := counts_after(stream, *message, at=at)) is not None:
                assert session_counts.sessions == {n: count for n, count in expected.items() if count}
                reports += 1
    assert reports == 1


@given(st.binary(max_size=200))
def test_any_message_is_tolerated(data: bytes) -> None:
    new_stream().receive(data, 1.0)


@given(st.lists(st.binary(max_size=60).map(lambda tail: b"\x0a\x0etidevoy.logins" + tail), max_size=5))
def test_malformed_families_do_not_affect_others(families: list[bytes]) -> None:
    stream = new_stream()
    stream.receive(metrics_message(*families, envoy="e1"), 1.0)
    assert set(flush(stream, logins(5, B), envoy="").nodes) >= {B}


def test_parser_matches_the_wire_format() -> None:
    """The bytes are written by hand from the field numbers, to detect mistakes in our .proto file."""
    label = b"\x0a\x04node\x12\x0d10.0.0.1:4000"
    metric = b"\x0a" + bytes([len(label)]) + label + b"\x1a\x09\x09" + b"\x00\x00\x00\x00\x00\x00\x08\x40"
    metric += b"\x30\x80\x01"  # a timestamp
    family = b"\x0a\x0etidevoy.logins\x18\x00\x22" + bytes([len(metric)]) + metric
    message = b"\x0a\x07\x0a\x05\x0a\x03e-7" + b"\x12" + bytes([len(family)]) + family
    stream = new_stream()
    assert stream.receive(message, 1.0) is None
    report = flush(stream, envoy="")
    assert (report.envoy, report.nodes) == ("e-7", {A: Traffic(logins=3)})
    assert LabelPair.FromString(label).value == A
    assert StreamMetricsMessage.FromString(message).identifier.node.id == "e-7"

"""Series of what modules told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.metrics.registry import Metrics, MetricsSnapshot
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from tests.support.controlplane.telemetry_messages import (
    all_families,
    metric_family,
    metrics_message,
    module_info_family,
)

A = "10.0.0.1:4000"


def shown(*reports: ModuleReport) -> CollectorRegistry:
    sight = MetricsSnapshot(
        (), (), (), is_panic_threshold_active=False, is_published=True, module_reports=reports
    )
    return Metrics(lambda: sight).registry


def report(envoy: str, *families: bytes) -> ModuleReport:
    made = TelemetryStream(lambda: frozenset((A,))).receive(
        metrics_message(*families, module_info_family(), envoy=envoy), 1.0
    )
    assert made is not None
    return made


def test_each_envoy_has_series_of_its_own() -> None:
    registry = shown(
        report("one", *all_families(A)), report("two", metric_family("tidevoy.logins", 5, node=A))
    )
    at = {"envoy": "one", "node": A}
    expected = {
        ("tidevoy_module_info", "version", "0.1.0"): 1,
        ("tidevoy_sessions", "state", "idle"): 3,
        ("tidevoy_sessions", "state", "transaction"): 2,
        ("tidevoy_sessions_pinned", "reason", "transaction"): 2,
        ("tidevoy_login_failures_total", "reason", "denied"): 4,
        ("tidevoy_connect_failures_total", "reason", "tls"): 5,
        ("tidevoy_commands_total", "kind", "query"): 100,
        ("tidevoy_command_seconds_bucket", "le", "0.0005"): 0,
        ("tidevoy_command_seconds_bucket", "le", "1.0"): 50,
        ("tidevoy_command_seconds_bucket", "le", "+Inf"): 100,
        ("tidevoy_errors_total", "class", "deadlock"): 6,
        ("tidevoy_bytes_total", "direction", "to_node"): 700,
    }
    for (name, label, word), value in expected.items():
        labels = {"envoy": "one"} if label == "version" else at
        assert registry.get_sample_value(name, labels | {label: word}) == value, (name, word)
    moved = at | {"result": "moved", "reason": "ok"}
    assert registry.get_sample_value("tidevoy_migrations_total", moved) == 8
    slow = at | {"result": "stayed", "reason": "slow"}
    assert registry.get_sample_value("tidevoy_migrations_total", slow) == 3
    for le, count in (("0.005", 0), ("0.01", 6), ("+Inf", 8)):
        bucket = registry.get_sample_value("tidevoy_migration_duration_seconds_bucket", at | {"le": le})
        assert bucket == count, le
    assert registry.get_sample_value("tidevoy_migration_duration_seconds_sum", at) == 0.04
    assert registry.get_sample_value("tidevoy_command_seconds_sum", at) == 2.5
    assert registry.get_sample_value("tidevoy_command_seconds_count", at) == 100
    logins = [registry.get_sample_value("tidevoy_logins_total", at | {"envoy": e}) for e in ("one", "two")]
    assert logins == [9, 5]
    nobody = {"envoy": "one", "node": "", "reason": "bad_packet"}
    assert registry.get_sample_value("tidevoy_login_failures_total", nobody) == 1


def test_an_ejection_is_shown_with_reason_and_time() -> None:
    ejected = metric_family("tidevoy.ejected_since", 1000, gauge=True, node=A, reason="closed")
    registry = shown(report("one", *all_families(A), ejected))
    labels = {"envoy": "one", "node": A, "reason": "closed"}
    assert registry.get_sample_value("tidevoy_node_ejected_since", labels) == 1000


def test_what_was_left_out_is_counted() -> None:
    of_a_stranger = metric_family("tidevoy.logins", 1, node="10.9.9.9:4000")
    registry = shown(report("one", *all_families(A), of_a_stranger))
    assert registry.get_sample_value("tidevoy_telemetry_dropped_total", {"envoy": "one"}) == 1


def test_the_text_is_one_that_prometheus_reads() -> None:
    text = generate_latest(shown(report('an "envoy"\n', *all_families(A)))).decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert families["tidevoy_command_seconds"].type == "histogram"
    assert families["tidevoy_migration_duration_seconds"].type == "histogram"
    assert {sample.labels["envoy"] for sample in families["tidevoy_sessions"].samples} == {'an "envoy"\n'}
    assert families["tidevoy_logins"].documentation == "Logins that succeeded."

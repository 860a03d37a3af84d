"""Prometheus metrics from module reports."""

from __future__ import annotations

import pytest
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


def registry_of(*reports: ModuleReport) -> CollectorRegistry:
    snapshot = MetricsSnapshot(
        (), (), (), is_panic_threshold_active=False, is_published=True, module_reports=reports
    )
    return Metrics(lambda: snapshot).registry


def report(envoy: str, *families: bytes) -> ModuleReport:
    module_report = TelemetryStream(lambda: frozenset((A,))).receive(
        metrics_message(*families, module_info_family(), envoy=envoy), 1.0
    )
    assert module_report is not None
    return module_report


def test_each_envoy_has_its_own_series() -> None:
    registry = registry_of(
        report("one", *all_families(A)), report("two", metric_family("tidevoy.logins", 5, node=A))
    )
    base_labels = {"envoy": "one", "node": A}
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
    for (name, label, label_value), value in expected.items():
        labels = {"envoy": "one"} if label == "version" else base_labels
        sample = registry.get_sample_value(name, labels | {label: label_value})
        assert sample == value, (name, label_value)
    moved_labels = base_labels | {"result": "moved", "reason": "ok"}
    assert registry.get_sample_value("tidevoy_migrations_total", moved_labels) == 8
    slow_labels = base_labels | {"result": "failed", "reason": "slow"}
    assert registry.get_sample_value("tidevoy_migrations_total", slow_labels) == 3
    for le, count in (("0.005", 0), ("0.01", 6), ("+Inf", 8)):
        bucket = registry.get_sample_value(
            "tidevoy_migration_duration_seconds_bucket", base_labels | {"le": le}
        )
        assert bucket == count, le
    assert registry.get_sample_value("tidevoy_migration_duration_seconds_sum", base_labels) == 0.04
    assert registry.get_sample_value("tidevoy_command_seconds_sum", base_labels) == 2.5
    assert registry.get_sample_value("tidevoy_command_seconds_count", base_labels) == 100
    logins = [
        registry.get_sample_value("tidevoy_logins_total", base_labels | {"envoy": e}) for e in ("one", "two")
    ]
    assert logins == [9, 5]
    no_node_labels = {"envoy": "one", "node": "", "reason": "bad_packet"}
    assert registry.get_sample_value("tidevoy_login_failures_total", no_node_labels) == 1


def test_ejection_is_exported_with_reason_and_time() -> None:
    ejected = metric_family("tidevoy.ejected_since", 1000, gauge=True, node=A, reason="closed")
    registry = registry_of(report("one", *all_families(A), ejected))
    labels = {"envoy": "one", "node": A, "reason": "closed"}
    assert registry.get_sample_value("tidevoy_node_ejected_since", labels) == 1000


@pytest.mark.parametrize("log", ["login_log", "statement_log"])
def test_log_is_exported_if_it_is_on(log: str) -> None:
    written = metric_family(f"tidevoy.{log}_lines", 7, result="written")
    registry = registry_of(report("one", *all_families(A)), report("two", written))
    for labels, value in (({"result": "written"}, 7), ({"result": "dropped"}, 0)):
        assert registry.get_sample_value(f"tidevoy_{log}_lines_total", {"envoy": "two"} | labels) == value
        assert registry.get_sample_value(f"tidevoy_{log}_lines_total", {"envoy": "one"} | labels) is None
    assert registry.get_sample_value(f"tidevoy_{log}_write_errors_total", {"envoy": "two"}) == 0


def test_capture_is_exported_once_there_was_one() -> None:
    counts = {"active": 1, "records": 9, "dropped": 2, "filtered": 1, "bytes": 700, "write_errors": 3}
    gauges = [metric_family(f"tidevoy.capture_{name}", value, gauge=True) for name, value in counts.items()]
    registry = registry_of(report("one", *gauges), report("two"))
    for name, value in counts.items():
        series = f"tidevoy_capture_{name}" + ("" if name == "active" else "_total")
        assert registry.get_sample_value(series, {"envoy": "one"}) == value
        assert registry.get_sample_value(series, {"envoy": "two"}) is None


def test_dropped_series_are_counted() -> None:
    unknown_node_family = metric_family("tidevoy.logins", 1, node="10.9.9.9:4000")
    registry = registry_of(report("one", *all_families(A), unknown_node_family))
    assert registry.get_sample_value("tidevoy_telemetry_dropped_total", {"envoy": "one"}) == 1


def test_exposition_text_is_valid() -> None:
    text = generate_latest(registry_of(report('an "envoy"\n', *all_families(A)))).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["tidevoy_command_seconds"].type == "histogram"
    assert families["tidevoy_migration_duration_seconds"].type == "histogram"
    assert {sample.labels["envoy"] for sample in families["tidevoy_sessions"].samples} == {'an "envoy"\n'}
    assert families["tidevoy_logins"].documentation == "Successful logins."

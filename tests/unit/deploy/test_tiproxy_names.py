"""Recording rules with the names of TiProxy, and the table that says what means the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.importers.tiproxy.metrics import ALERTS, METRICS
from tests.support.promql import check_query, exported_series, run_promtool, selectors

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy/prometheus/rules/tiproxy-names.yml"
CASES = ROOT / "tests/unit/deploy/tiproxy_names.yml"
HISTOGRAM_SUFFIXES = re.compile(r"_(bucket|sum|count)$")

# What pkg/metrics registers at commit dd4b39c2103944c8f3b4f805e26fa0249f05508b of TiProxy.
REGISTERED = {
    *("tiproxy_server_connections", "tiproxy_server_create_connection_total"),
    *("tiproxy_server_reject_connection_total", "tiproxy_server_disconnection_total"),
    *("tiproxy_server_maxprocs", "tiproxy_server_owner", "tiproxy_server_event", "tiproxy_server_err"),
    *("tiproxy_monitor_time_jump_back_total", "tiproxy_monitor_keep_alive_total"),
    *("tiproxy_session_query_total", "tiproxy_session_query_duration_seconds"),
    *("tiproxy_session_query_time_since_conn_creation_seconds", "tiproxy_session_conn_lifetime_seconds"),
    *("tiproxy_session_handshake_duration_seconds", "tiproxy_backend_b_status"),
    *("tiproxy_backend_get_backend_duration_seconds", "tiproxy_backend_get_backend"),
    *("tiproxy_backend_dial_backend_fail", "tiproxy_backend_ping_duration_seconds"),
    *("tiproxy_backend_health_check_seconds", "tiproxy_backend_backend_metric", "tiproxy_balance_b_conn"),
    *("tiproxy_balance_b_score", "tiproxy_balance_pending_migrate", "tiproxy_balance_migrate_total"),
    *("tiproxy_balance_migrate_duration_seconds", "tiproxy_traffic_inbound_bytes"),
    *("tiproxy_traffic_inbound_packets", "tiproxy_traffic_outbound_bytes"),
    *("tiproxy_traffic_outbound_packets", "tiproxy_traffic_cross_location_bytes"),
    *("tiproxy_replay_pending_cmds", "tiproxy_replay_wait_time"),
}
# What pkg/metrics/grafana/tiproxy_summary.json and pkg/metrics/alertmanager/tiproxy.rules.yml query there.
DASHBOARD = {
    *("tiproxy_server_maxprocs", "tiproxy_server_connections", "tiproxy_server_create_connection_total"),
    *("tiproxy_server_disconnection_total", "tiproxy_server_owner"),
    *(f"tiproxy_session_query_duration_seconds_{part}" for part in ("bucket", "sum", "count")),
    "tiproxy_session_query_total",
    *(f"tiproxy_session_handshake_duration_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("tiproxy_balance_b_conn", "tiproxy_balance_migrate_total", "tiproxy_balance_pending_migrate"),
    *(f"tiproxy_balance_migrate_duration_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"tiproxy_backend_get_backend_duration_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("tiproxy_backend_ping_duration_seconds", "tiproxy_backend_health_check_seconds"),
    *("tiproxy_backend_dial_backend_fail", "tiproxy_traffic_inbound_bytes"),
    *("tiproxy_traffic_inbound_packets", "tiproxy_traffic_outbound_bytes"),
    *("tiproxy_traffic_outbound_packets", "tiproxy_traffic_cross_location_bytes"),
}
ALERT_METRICS = {
    *("tiproxy_monitor_time_jump_back_total", "tiproxy_server_err", "tiproxy_backend_get_backend"),
}
TIPROXY_ALERTS = {
    *("TiProxyServerIsDown", "TiProxyDiscoveredTimeJumpBack", "TiProxyReportErr", "TiProxyGetBackendFail"),
}
# Labels by which the dashboard and the alerts group, besides `le`.
TIPROXY_LABELS = {"instance", "backend", "cmd_type", "type", "migrate_res", "from", "to", "reason", "res"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_of(series: str) -> str:
    """Return the metric of a series: without the suffix of a histogram."""
    base = HISTOGRAM_SUFFIXES.sub("", series)
    return base if base in REGISTERED else series


def test_the_table_has_every_metric_of_tiproxy_once() -> None:
    names = [each.name for each in METRICS]
    assert len(names) == len(set(names))
    assert set(names) == REGISTERED
    assert {metric_of(series) for series in DASHBOARD | ALERT_METRICS} <= set(names)


def test_the_table_has_every_alert_of_tiproxy() -> None:
    assert {each.name for each in ALERTS} == TIPROXY_ALERTS
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/tidevoy.yml").read_text())["groups"]
    existing = {rule["alert"] for group in groups for rule in group["rules"]}
    assert {alert for each in ALERTS for alert in each.tidevoy} <= existing


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["record"]))
def test_a_rule_records_what_the_table_says(rule: dict[str, Any]) -> None:
    check_query(rule["expr"])
    (match,) = [each for each in METRICS if each.name == metric_of(rule["record"])]
    assert match.has_rule
    ((queried, _),) = set(selectors(rule["expr"]))
    documented = match.tidevoy.partition("{")[0]
    assert HISTOGRAM_SUFFIXES.sub("", queried) == HISTOGRAM_SUFFIXES.sub("", documented)
    selector = match.tidevoy.removeprefix(documented)
    assert selector in rule["expr"]
    assert set(rule.get("labels", {})) <= TIPROXY_LABELS


def test_every_metric_with_a_rule_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules()}
    assert {metric_of(name) for name in recorded} == {each.name for each in METRICS if each.has_rule}
    histogram = "tiproxy_session_query_duration_seconds"
    assert {f"{histogram}_{part}" for part in ("bucket", "sum", "count")} <= recorded


def test_the_table_names_only_metrics_of_tidevoy_that_exist() -> None:
    series = {HISTOGRAM_SUFFIXES.sub("", name) for name in exported_series()} | set(exported_series())
    for each in METRICS:
        for name in filter(None, each.tidevoy.split(", ")):
            assert name.partition("{")[0] in series, each.name
        for name in re.findall(r"\btidevoy_\w+", each.remark):
            assert name in series, each.name


def test_rules_pass_promtool_tests() -> None:
    run_promtool("check", "rules", str(RULES))
    run_promtool("test", "rules", str(CASES))
    tested = CASES.read_text()
    assert all(rule["record"] in tested for rule in rules())

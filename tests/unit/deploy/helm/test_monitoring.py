"""The objects for Prometheus Operator and Grafana."""

from __future__ import annotations

import json

from tests.support.kubernetes.rendered_chart import is_selected
from tests.support.kubernetes.value_cases import rendered


def test_service_monitor_selects_rest_port_with_job_of_the_alerts() -> None:
    chart = rendered("monitoring")
    (monitor,) = chart.of_kind("ServiceMonitor")
    service = chart.get("Service", "tidevoy-api")
    assert is_selected(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {"targetLabel": "job", "replacement": "tidevoy"} in endpoint["relabelings"]
    certificate = chart.get("Certificate", "tidevoy-api")
    assert endpoint["tlsConfig"]["serverName"] in certificate["spec"]["dnsNames"]


def test_rules_have_alerts() -> None:
    (rule,) = rendered("monitoring").of_kind("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    alerts = [each["alert"] for group in rule["spec"]["groups"] for each in group["rules"]]
    assert "TidevoyNoNodeInService" in alerts


def test_dashboards_use_data_source_of_the_values() -> None:
    config_map = rendered("monitoring").get("ConfigMap", "tidevoy-dashboards")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    boards = {name: json.loads(text) for name, text in config_map["data"].items()}
    assert len(boards) == 4
    for board in boards.values():
        targets = [target for panel in board["panels"] for target in panel["targets"]]
        assert {each["datasource"]["uid"] for each in (*board["panels"], *targets)} == {"mimir"}

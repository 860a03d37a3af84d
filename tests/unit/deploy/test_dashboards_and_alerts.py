"""Dashboards, alerts and their documentation use only series that are exported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.controlplane.promql import TARGET_LABELS, check, clauses, exported, promtool

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
CASES = ROOT / "tests/unit/deploy/alerts.yml"
GUIDE = "docs/operate/observability.md"

# Variables that Grafana fills in.
GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$node": ".*", "$instance": ".*"}


def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def targets(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in board["panels"] for target in panel["targets"]]


def alerts() -> dict[str, dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_exported_lists_series_and_labels() -> None:
    """If `exported` listed labels that a series does not have, the tests below would miss errors."""
    assert exported()["tidevoy_migrations_total"] == TARGET_LABELS | {"envoy", "node", "result", "reason"}
    assert exported()["tidevoy_plan_duration_seconds_bucket"] == TARGET_LABELS | {"le"}
    assert exported()["tidevoy_events_total"] == TARGET_LABELS | {"kind"}
    assert exported()["tidevoy_certificate_expiry_timestamp_seconds"] == TARGET_LABELS | {"setting"}


@pytest.mark.parametrize(
    ("expr", "text", "problem"),
    [
        ("sum(tidevoy_no_such)", "", "tidevoy_no_such is not exported"),
        ("tidevoy_events_total{knid=~'x'}", "", "has no frozenset({'knid'})"),
        ("sum by (envoy) (rate(tidevoy_events_total[5m]))", "", "no queried series has {'envoy'}"),
        ("tidevoy_panic_threshold_active", "{{node}}", "no queried series has {'node'}"),
        ("vector(1)", "", "no series"),
    ],
)
def test_check_detects_unknown_series_and_labels(expr: str, text: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(problem)):
        check(expr, text)


@pytest.mark.parametrize("name", boards())
def test_dashboard_queries_exported_series(name: str) -> None:
    board = boards()[name]
    for target in targets(board):
        check(target["expr"], target["legendFormat"])
    for annotation in board["annotations"]["list"]:
        check(annotation["expr"], annotation["titleFormat"] + annotation["textFormat"])
    for variable in board["templating"]["list"]:
        listed = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert listed is not None
        assert listed[2] in exported()[listed[1]]
        assert f"${variable['name']}" in GRAFANA_VARIABLES


def test_prometheus_parses_all_queries(tmp_path: Path) -> None:
    expressions = [target["expr"] for board in boards().values() for target in targets(board)]
    expressions += [
        annotation["expr"] for board in boards().values() for annotation in board["annotations"]["list"]
    ]
    for name, value in GRAFANA_VARIABLES.items():
        expressions = [expr.replace(name, value) for expr in expressions]
    rules = [{"record": f"expression:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    file = tmp_path / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "expressions", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_dashboards_have_valid_layout_and_descriptions() -> None:
    assert set(boards()) == {"fleet", "node", "migration", "control-plane"}
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ][0]["uid"]
    assert len({board["uid"] for board in boards().values()}) == len(boards())
    for board in boards().values():
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert {panel["datasource"]["uid"] for panel in panels} == {source}
        assert {target["datasource"]["uid"] for target in targets(board)} == {source}
        occupied: set[tuple[int, int]] = set()
        for panel in panels:
            assert panel["description"].endswith("."), panel["title"]
            position = panel["gridPos"]
            assert position["x"] + position["w"] <= 24
            cells = {
                (position["x"] + x, position["y"] + y)
                for x in range(position["w"])
                for y in range(position["h"])
            }
            assert not cells & occupied, panel["title"]
            occupied |= cells


@pytest.mark.parametrize("name", alerts())
def test_alert_queries_exported_series_and_has_runbook(name: str) -> None:
    rule = alerts()[name]
    check(rule["expr"])
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in {*clauses(rule["expr"]), *TARGET_LABELS}
    assert rule["labels"]["severity"] in ("warning", "critical")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (page, anchor) == (GUIDE, name.lower())
    (chapter,) = re.findall(rf"^### {name}\n\n(.+?)(?=^### |\Z)", (ROOT / GUIDE).read_text(), re.M | re.S)
    assert chapter.startswith("*Critical.*") == (rule["labels"]["severity"] == "critical")


def test_guide_documents_exactly_the_existing_alerts() -> None:
    assert re.findall(r"^### (\w+)$", (ROOT / GUIDE).read_text(), re.M) == list(alerts())


def test_alerts_pass_promtool_tests() -> None:
    tested = [case["name"] for case in yaml.safe_load(CASES.read_text())["tests"]]
    assert tested == [f"{name} {how}" for name in alerts() for how in ("fires", "is quiet")]
    for rules in RULES:
        promtool("check", "rules", str(rules))
    promtool("test", "rules", str(CASES))


def test_prometheus_config_loads_rules() -> None:
    promtool("check", "config", str(ROOT / "deploy/prometheus/prometheus.yml"))
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules/*.yml"]
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]["volumes"]
    assert "./deploy/prometheus/rules:/etc/prometheus/rules:ro" in volumes

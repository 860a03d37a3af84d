"""Dashboards, alerts, and what is written about them: they ask for what is exported, and for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from api.auth.access_control import AccessController
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from sandbox.child_process import find_program

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
CASES = ROOT / "tests/unit/deploy/alerts.yml"
GUIDE = "docs/operate/observability.md"

# What Prometheus makes by itself, and what it adds to all that it scrapes.
ITS_OWN = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate"})}
ADDED = frozenset({"instance", "job"})
# What Grafana fills in.
FILLED_IN = {"$__rate_interval": "5m", "$__range": "1h", "$node": ".*", "$instance": ".*"}
WORDS = frozenset({"and", "or", "unless", "bool", "offset"})


@cache
def exported() -> Mapping[str, frozenset[str]]:
    """All series that a control plane exports, also those that have no sample yet, with their labels."""
    everything = {"pd": {"urls": ["http://127.0.0.1:1"]}, "replicas": {"enabled": True}}
    engine = Engine(Settings.model_validate(everything))
    AccessController(engine)
    registry = engine.registry
    found: dict[str, frozenset[str]] = {}
    for collector in list(registry._collector_to_names):
        wrapped = isinstance(collector, MetricWrapperBase)
        for family in collector.collect():
            labels = frozenset(getattr(collector if wrapped else family, "_labelnames", ()))
            ends = {
                "counter": {"_total": labels},
                "histogram": {"_bucket": labels | {"le"}, "_sum": labels, "_count": labels},
            }
            for end, its in ends.get(family.type, {"": labels}).items():
                found[family.name + end] = its
    return {name: labels | ADDED for name, labels in (found | ITS_OWN).items()}


def without_texts(expr: str) -> str:
    return re.sub(r'"[^"]*"', '""', expr)


def clauses(expr: str) -> Iterator[str]:
    """The labels by which an expression groups and matches."""
    for listed in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", without_texts(expr)):
        yield from filter(None, (label.strip() for label in listed.split(",")))


def selectors(expr: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The series that an expression asks for, each with the labels that it chooses by."""
    bare = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", without_texts(expr))
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    for name, chosen in re.findall(r"\b([a-zA-Z_]\w*)\b(?!\s*\()\s*(?:\{([^}]*)\})?", bare):
        if name not in WORDS:
            yield name, frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))


def check(expr: str, shown: str = "") -> None:
    """That an expression, and the text that it is `shown` with, name nothing that there is not."""
    asked = list(selectors(expr))
    assert asked, f"no series in {expr}"
    known: frozenset[str] = frozenset()
    for name, labels in asked:
        assert name in exported(), f"{name} is not exported: {expr}"
        assert labels <= exported()[name], f"{name} has no {labels - exported()[name]}: {expr}"
        known |= exported()[name]
    used = {*clauses(expr), *re.findall(r"\{\{(\w+)\}\}", shown)}
    assert used <= known, f"nothing here has {used - known}: {expr} {shown}"


def promtool(*arguments: str) -> None:
    program = find_program("promtool", "prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def targets(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in board["panels"] for target in panel["targets"]]


def alerts() -> dict[str, dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_what_is_exported_is_found() -> None:
    """Else all below would find nothing wrong."""
    assert exported()["tidevoy_migrations_total"] == ADDED | {"envoy", "node", "result", "reason"}
    assert exported()["tidevoy_plan_duration_seconds_bucket"] == ADDED | {"le"}
    assert exported()["tidevoy_events_total"] == ADDED | {"kind"}
    assert exported()["tidevoy_certificate_expiry_timestamp_seconds"] == ADDED | {"setting"}


@pytest.mark.parametrize(
    ("expr", "shown", "wrong"),
    [
        ("sum(tidevoy_no_such)", "", "tidevoy_no_such is not exported"),
        ("tidevoy_events_total{knid=~'x'}", "", "has no frozenset({'knid'})"),
        ("sum by (envoy) (rate(tidevoy_events_total[5m]))", "", "nothing here has {'envoy'}"),
        ("tidevoy_floor_active", "{{node}}", "nothing here has {'node'}"),
        ("vector(1)", "", "no series"),
    ],
)
def test_what_is_not_there_is_found_out(expr: str, shown: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        check(expr, shown)


@pytest.mark.parametrize("name", boards())
def test_a_dashboard_asks_for_what_is_exported(name: str) -> None:
    board = boards()[name]
    for target in targets(board):
        check(target["expr"], target["legendFormat"])
    for note in board["annotations"]["list"]:
        check(note["expr"], note["titleFormat"] + note["textFormat"])
    for variable in board["templating"]["list"]:
        listed = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert listed is not None
        assert listed[2] in exported()[listed[1]]
        assert f"${variable['name']}" in FILLED_IN


def test_prometheus_understands_every_question(tmp_path: Path) -> None:
    asked = [target["expr"] for board in boards().values() for target in targets(board)]
    asked += [note["expr"] for board in boards().values() for note in board["annotations"]["list"]]
    for name, value in FILLED_IN.items():
        asked = [expr.replace(name, value) for expr in asked]
    rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(asked)]
    file = tmp_path / "asked.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_dashboards_are_laid_out_and_explained() -> None:
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
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            assert panel["description"].endswith("."), panel["title"]
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            taken |= cells


@pytest.mark.parametrize("name", alerts())
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(name: str) -> None:
    rule = alerts()[name]
    check(rule["expr"])
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in {*clauses(rule["expr"]), *ADDED}
    assert rule["labels"]["severity"] in ("warning", "critical")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (page, anchor) == (GUIDE, name.lower())
    (chapter,) = re.findall(rf"^### {name}\n\n(.+?)(?=^### |\Z)", (ROOT / GUIDE).read_text(), re.M | re.S)
    assert chapter.startswith("*Critical.*") == (rule["labels"]["severity"] == "critical")


def test_the_guide_tells_of_no_alert_that_there_is_not() -> None:
    assert re.findall(r"^### (\w+)$", (ROOT / GUIDE).read_text(), re.M) == list(alerts())


def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = [case["name"] for case in yaml.safe_load(CASES.read_text())["tests"]]
    assert tested == [f"{name} {how}" for name in alerts() for how in ("fires", "is quiet")]
    for rules in RULES:
        promtool("check", "rules", str(rules))
    promtool("test", "rules", str(CASES))


def test_prometheus_loads_the_rules() -> None:
    promtool("check", "config", str(ROOT / "deploy/prometheus/prometheus.yml"))
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules/*.yml"]
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]["volumes"]
    assert "./deploy/prometheus/rules:/etc/prometheus/rules:ro" in volumes

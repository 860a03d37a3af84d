"""Check PromQL expressions against the series that the control plane exports, without a running one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics import MetricWrapperBase

from api.auth.access_control import AccessController
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from sandbox.child_process import find_program

RULES = sorted((Path(__file__).resolve().parents[2] / "deploy/prometheus/rules").glob("*.yml"))

# Series that Prometheus creates, and labels that it adds to every scraped series.
PROMETHEUS_SERIES = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate"})}
TARGET_LABELS = frozenset({"instance", "job"})
KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset"})


@cache
def exported_series() -> Mapping[str, frozenset[str]]:
    """Return the labels of each exported series, even of one without a sample, and of `PROMETHEUS_SERIES`."""
    config = {"pd": {"urls": ["http://127.0.0.1:1"]}, "replicas": {"enabled": True}}
    engine = Engine(Settings.model_validate(config))
    AccessController(engine)
    registry = engine.registry
    series: dict[str, frozenset[str]] = {}
    for collector in list(registry._collector_to_names):
        wrapped = isinstance(collector, MetricWrapperBase)
        for family in collector.collect():
            labels = frozenset(getattr(collector if wrapped else family, "_labelnames", ()))
            suffixes = {
                "counter": {"_total": labels},
                "histogram": {"_bucket": labels | {"le"}, "_sum": labels, "_count": labels},
            }
            for suffix, suffix_labels in suffixes.get(family.type, {"": labels}).items():
                series[family.name + suffix] = suffix_labels
    return {name: labels | TARGET_LABELS for name, labels in (series | PROMETHEUS_SERIES).items()}


def without_literals(expr: str) -> str:
    return re.sub(r'"[^"]*"', '""', expr)


def grouping_labels(expr: str) -> Iterator[str]:
    """Yield the labels by which an expression groups and matches."""
    for listed in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", without_literals(expr)):
        yield from filter(None, (label.strip() for label in listed.split(",")))


def selectors(expr: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the series that an expression queries, each with the labels of its selector."""
    bare = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", without_literals(expr))
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    for name, matchers in re.findall(r"\b([a-zA-Z_]\w*)\b(?!\s*\()\s*(?:\{([^}]*)\})?", bare):
        if name not in KEYWORDS:
            yield name, frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def check_query(expr: str, text: str = "") -> None:
    """Check that an expression and its displayed `text` use only existing series and labels."""
    queried = list(selectors(expr))
    assert queried, f"no series in {expr}"
    available: frozenset[str] = frozenset()
    for name, labels in queried:
        assert name in exported_series(), f"{name} is not exported: {expr}"
        assert labels <= exported_series()[name], f"{name} has no {labels - exported_series()[name]}: {expr}"
        available |= exported_series()[name]
    used = {*grouping_labels(expr), *re.findall(r"\{\{(\w+)\}\}", text)}
    assert used <= available, f"no queried series has {used - available}: {expr} {text}"


def run_promtool(*arguments: str) -> None:
    program = find_program("promtool", "prometheus")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def check_syntax(expressions: Iterable[str], directory: Path) -> None:
    """Let Prometheus parse the expressions; `directory`: for a file with them."""
    rules = [{"record": f"expression:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    file = directory / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "expressions", "rules": rules}]}))
    run_promtool("check", "rules", str(file))


def alert_rules() -> dict[str, dict[str, Any]]:
    """Return the rules of all alerts by name."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}

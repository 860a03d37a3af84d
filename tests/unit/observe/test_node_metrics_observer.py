"""When a source of vital signs counts as failed."""

from __future__ import annotations

from controlplane.config.settings import Settings
from controlplane.observe.node_metrics.observer import NodeMetricsObserver


def test_a_prometheus_that_fails_now_and_then_is_no_outage() -> None:
    told: list[str] = []
    observer = NodeMetricsObserver(Settings(), lambda _, outage: told.append(outage), lambda: 0.0)
    for problem in ("away", "away", "", "away", "away", "away", ""):
        observer._on_metrics({}, problem)
    outage = "CPU, memory and health of the nodes cannot be read: away"
    assert told == ["", "", "", "", "", outage, ""]

"""When read failures of node metrics count as an outage."""

from __future__ import annotations

from controlplane.config.settings import Settings
from controlplane.observe.node_metrics.observer import NodeMetricsObserver


def test_three_consecutive_prometheus_failures_are_an_outage() -> None:
    outages: list[str] = []
    observer = NodeMetricsObserver(Settings(), lambda _, outage: outages.append(outage), lambda: 0.0)
    for problem in ("away", "away", "", "away", "away", "away", ""):
        observer._store("Prometheus", {}, problem)
    outage = "node metrics are unavailable; last error: away"
    assert outages == ["", "", "", "", "", outage, ""]

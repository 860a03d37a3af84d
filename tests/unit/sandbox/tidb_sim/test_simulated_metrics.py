"""The load and health that a simulated server reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.model.node_metrics import CounterSample, NodeMetrics
from controlplane.observe.node_metrics.exposition_parser import parse_exposition
from controlplane.observe.node_metrics.rates import append_sample, compute_node_metrics
from sandbox.tidb_sim.simulated_metrics import SimulatedMetrics


class ClockedMetrics:
    """Simulated metrics with a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = SimulatedMetrics(lambda: self.now)

    def sample(self) -> CounterSample:
        sample = parse_exposition(self.metrics.render().encode(), self.now)
        assert sample is not None
        return sample

    def observe(self, seconds: float) -> NodeMetrics:
        """Take two samples and return the metrics computed from them."""
        first = self.sample()
        self.now += seconds
        return compute_node_metrics(append_sample((first,), self.sample()))

    def set_values(self, **values: Any) -> None:
        self.metrics.set_values(json.dumps(values).encode())


def ratios(metrics: NodeMetrics) -> list[float | None]:
    values = (metrics.cpu, metrics.memory, metrics.pd_failures, metrics.tikv_failures)
    return [value.value if value is not None else None for value in values]


def test_reports_calm_node_by_default() -> None:
    metrics = ClockedMetrics()
    assert ratios(metrics.observe(5.0)) == pytest.approx([0.05, 0.1, 0.0, 0.0])
    sample = metrics.sample()
    assert None not in [getattr(sample, field) for field in CounterSample.__slots__]


def test_reports_values_once_they_are_set() -> None:
    metrics = ClockedMetrics()
    metrics.now += 1000.0
    metrics.set_values(cpu=0.95, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=3)
    observed = metrics.observe(5.0)
    assert ratios(observed) == pytest.approx([0.95, 0.8, 0.5, 0.4])
    assert observed.cpu_quota == 3.0
    metrics.set_values(pd_failures=0)
    assert ratios(metrics.observe(5.0)) == pytest.approx([0.95, 0.8, 0.0, 0.4])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"7",
        b'{"cup": 1}',
        b'{"cpu": -1}',
        b'{"cpu": "1"}',
        b'{"cpu": true}',
        b'{"cpu": Infinity}',
    ],
)
def test_rejects_invalid_values_without_effect(body: bytes) -> None:
    metrics = ClockedMetrics()
    with pytest.raises(ValueError, match=r"."):
        metrics.metrics.set_values(body)
    with pytest.raises(ValueError, match="swap"):
        metrics.set_values(cpu=0.9, swap=1)
    assert ratios(metrics.observe(5.0)) == pytest.approx([0.05, 0.1, 0.0, 0.0])

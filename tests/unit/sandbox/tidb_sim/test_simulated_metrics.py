"""What a stand-in shows of its load and health."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.model.node_metrics import CounterSample, NodeMetrics
from controlplane.observe.node_metrics.exposition_parser import ExpositionParser
from controlplane.observe.node_metrics.rates import append_sample, compute_node_metrics
from sandbox.tidb_sim.simulated_metrics import SimulatedMetrics


class Stand:
    """Signs with a clock of the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.signs = SimulatedMetrics(lambda: self.now)

    def sample(self) -> CounterSample:
        text = ExpositionParser()
        text.feed(self.signs.render().encode())
        found = text.sample(self.now)
        assert found is not None
        return found

    def seen_for(self, seconds: float) -> NodeMetrics:
        """What a reader makes of two samples."""
        first = self.sample()
        self.now += seconds
        return compute_node_metrics(append_sample((first,), self.sample()))

    def show(self, **told: Any) -> None:
        self.signs.set_values(json.dumps(told).encode())


def ratios(of: NodeMetrics) -> list[float | None]:
    read = (of.cpu, of.memory, of.pd_failures, of.tikv_failures)
    return [one.value if one is not None else None for one in read]


def test_it_is_calm_until_it_is_told_something() -> None:
    stand = Stand()
    assert ratios(stand.seen_for(5.0)) == pytest.approx([0.05, 0.1, 0.0, 0.0])
    sample = stand.sample()
    assert None not in [getattr(sample, part) for part in CounterSample.__slots__]


def test_it_shows_what_it_was_told_from_then_on() -> None:
    stand = Stand()
    stand.now += 1000.0
    stand.show(cpu=0.95, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=3)
    found = stand.seen_for(5.0)
    assert ratios(found) == pytest.approx([0.95, 0.8, 0.5, 0.4])
    assert found.cpu_quota == 3.0
    stand.show(pd_failures=0)
    assert ratios(stand.seen_for(5.0)) == pytest.approx([0.95, 0.8, 0.0, 0.4])


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
def test_what_it_does_not_understand_changes_nothing(body: bytes) -> None:
    stand = Stand()
    with pytest.raises(ValueError, match=r"."):
        stand.signs.set_values(body)
    with pytest.raises(ValueError, match="swap"):
        stand.show(cpu=0.9, swap=1)
    assert ratios(stand.seen_for(5.0)) == pytest.approx([0.05, 0.1, 0.0, 0.0])

"""Chart history: rates from cumulative counts, and gaps where the rate is unknown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.console import charts
from api.console.charts import (
    FLEET_KEY,
    INTERVAL_SECONDS,
    MAX_POINTS,
    History,
    HistoryPoint,
    TrafficSample,
    TrafficSampler,
    rest_seconds,
    to_columns,
)
from controlplane.engine.engine import Engine
from controlplane.model.traffic import EMPTY_BUCKETS

ONE = frozenset({"envoy-1"})


def buckets(*counts: int) -> tuple[int, ...]:
    """Return cumulative buckets; the last count fills the rest."""
    return (*counts, *((counts[-1],) * (len(EMPTY_BUCKETS) - len(counts))))


def test_rate_covers_the_time_since_the_previous_point() -> None:
    history = History()
    history.put("a", 100.0, TrafficSample(3, 1000, buckets(0, 1000)), ONE)
    history.put("a", 105.0, TrafficSample(4, 1050, buckets(0, 1050)), ONE)
    assert history.points("a") == (
        HistoryPoint(100.0, 3),
        HistoryPoint(105.0, 4, 10.0, 0.0005 + 0.0005 * 0.95),
    )
    assert history.latest("a") == history.points("a")[-1]


def test_percentile_covers_only_the_last_interval() -> None:
    history = History()
    history.put("a", 0.0, TrafficSample(1, 1000, buckets(1000)), ONE)
    history.put("a", 5.0, TrafficSample(1, 1100, buckets(1000, 1000, 1000, 1100)), ONE)
    latest = history.latest("a")
    assert latest is not None
    assert latest.p95 == pytest.approx(0.0025 + 0.0025 * 0.95)


def test_no_rate_across_gaps_new_envoys_and_restarts() -> None:
    history = History()
    history.put("a", 0.0, TrafficSample(1, 1000), ONE)
    history.put("a", 5.0, TrafficSample(1, 9000), ONE | {"envoy-2"})  # envoy-2 adds its earlier counts
    history.put("a", 10.0, TrafficSample(1, 9010), ONE | {"envoy-2"})
    history.put("a", 15.0, TrafficSample(1, 10), ONE | {"envoy-2"})  # an Envoy restarted
    history.put(
        "a", 15.0 + 10 * INTERVAL_SECONDS, TrafficSample(1, 20), ONE | {"envoy-2"}
    )  # no samples for a while
    history.put("a", 20.0 + 10 * INTERVAL_SECONDS, TrafficSample(None, None), frozenset())
    assert [point.rate for point in history.points("a")] == [None, None, 2.0, None, None, None]


def test_rate_covers_a_long_interval_of_a_large_fleet() -> None:
    history = History()
    history.put("a", 0.0, TrafficSample(1, 1000), ONE, 240.0)
    history.put("a", 240.0, TrafficSample(1, 3400), ONE, 240.0)
    latest = history.latest("a")
    assert latest is not None
    assert latest.rate == 10.0


def test_sampler_uses_a_small_share_of_a_core() -> None:
    worked = 0.004
    assert worked / (worked + rest_seconds(worked)) == pytest.approx(0.02)


class GrowingFleet:
    """A cluster of two nodes and one Envoy. A second Envoy reports as soon as the first node is read."""

    def __init__(self) -> None:
        self.plan = SimpleNamespace(nodes=["a", "b"])
        self.facts = SimpleNamespace(module_reports={"envoy-1": None})
        self.commands = 0
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def node(self, address: str) -> Any:
        self.facts.module_reports["envoy-2"] = None
        self.commands += 100
        traffic = SimpleNamespace(commands={"query": self.commands}, latency_buckets=EMPTY_BUCKETS)
        return SimpleNamespace(sessions=1, traffic=traffic)


async def test_fleet_has_no_rate_if_envoys_join_during_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "_MAX_SLICE_SECONDS", -1.0)  # a pause before each node
    fleet = GrowingFleet()
    sampler = TrafficSampler(cast(Engine, SimpleNamespace(cluster=fleet)))
    for _ in range(2):
        await sampler._take_sample(INTERVAL_SECONDS)
        del fleet.facts.module_reports["envoy-2"]
        fleet.at += INTERVAL_SECONDS
    assert [point.rate for point in sampler.history.points("a")] == [None, 40.0]
    assert [point.rate for point in sampler.history.points(FLEET_KEY)] == [None, None]


async def test_error_stops_only_the_sampler() -> None:
    await TrafficSampler(cast(Engine, SimpleNamespace())).run()  # an engine without a cluster


def test_idle_node_has_a_rate_but_no_percentile() -> None:
    history = History()
    for at in (0.0, 5.0):
        history.put("a", at, TrafficSample(0, 7, buckets(7)), ONE)
    assert history.latest("a") == HistoryPoint(5.0, 0, 0.0, None)


def test_late_samples_are_dropped() -> None:
    history = History()
    for at in (5.0, 5.0, 4.0):
        history.put("a", at, TrafficSample(1, 1), ONE)
    assert [point.at for point in history.points("a")] == [5.0]


def test_history_size_is_bounded() -> None:
    history = History()
    for step in range(3 * MAX_POINTS):
        for name in ("a", "b"):
            history.put(name, float(step), TrafficSample(step, step), ONE)
    assert len(history.points("a")) == MAX_POINTS
    history.retain(["b"])
    assert history.points("a") == ()
    assert history.latest("a") is None
    assert len(history.points("b")) == MAX_POINTS


counts = st.builds(
    TrafficSample,
    st.none() | st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
    st.lists(st.integers(0, 10**6), min_size=len(EMPTY_BUCKETS), max_size=len(EMPTY_BUCKETS)).map(tuple),
)


@given(st.lists(st.tuples(st.floats(0, 100), counts, st.sampled_from([ONE, frozenset()])), max_size=20))
def test_any_counts_give_valid_points(
    samples: list[tuple[float, TrafficSample, frozenset[str]]],
) -> None:
    history = History(max_points=5)
    for at, sample, envoys in samples:
        history.put("a", at, replace(sample), envoys)
    points = history.points("a")
    assert [point.at for point in points] == sorted({point.at for point in points})
    assert all(point.rate is None or point.rate >= 0 for point in points)
    assert all(point.p95 is None or point.p95 >= 0 for point in points)
    assert {len(column) for column in to_columns(points).values()} == {len(points)}

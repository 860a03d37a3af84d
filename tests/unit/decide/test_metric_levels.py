"""Levels of node metrics: their bounds and the hysteresis between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance import metric_levels
from controlplane.model.node_metrics import MetricValue, NodeMetrics

NOW = 1000.0

ratios = st.none() | st.builds(MetricValue, st.floats(0, 2), st.floats(NOW - 150, NOW))
node_metrics = st.builds(
    NodeMetrics,
    cpu=ratios,
    memory=ratios,
    memory_growth=st.floats(-0.1, 0.1),
    pd_failures=ratios,
    tikv_failures=ratios,
)


def failing(pd: float | None, tikv: float | None) -> NodeMetrics:
    return NodeMetrics(
        pd_failures=None if pd is None else MetricValue(pd, NOW),
        tikv_failures=None if tikv is None else MetricValue(tikv, NOW),
    )


def filling(used: float, growth: float = 0.0) -> NodeMetrics:
    return NodeMetrics(memory=MetricValue(used, NOW), memory_growth=growth)


@pytest.mark.parametrize(
    ("pd", "tikv", "level"),
    [(0.5, 0.0, 2), (0.0, 0.3, 2), (0.5, None, 2), (0.1, 0.1, 0), (None, 0.1, 0), (None, None, None)],
)
def test_health_level_is_the_worse_of_pd_and_tikv(
    pd: float | None, tikv: float | None, level: int | None
) -> None:
    for previous in (0, 2):
        assert metric_levels.health_level(failing(pd, tikv), previous, NOW) == level


@pytest.mark.parametrize(("pd", "tikv"), [(0.49, 0.0), (0.11, 0.29), (0.0, 0.11), (None, 0.2)])
def test_health_level_has_hysteresis(pd: float | None, tikv: float | None) -> None:
    assert [metric_levels.health_level(failing(pd, tikv), previous, NOW) for previous in (0, 2)] == [0, 2]


@pytest.mark.parametrize(
    ("used", "growth", "levels"),
    [
        (0.76, 0.0, (2, 2, 2)),
        (0.75, 0.0, (1, 1, 2)),
        (0.70, 0.0, (1, 1, 1)),
        (0.61, 0.0, (1, 1, 1)),
        (0.60, 0.0, (0, 1, 1)),
        (0.55, 0.0, (0, 0, 0)),
        (0.60, 0.3 / 44, (2, 2, 2)),
        (0.60, 0.3 / 46, (1, 1, 2)),
        (0.60, 0.3 / 61, (1, 1, 1)),
        (0.50, 0.4 / 179 * 1.2, (1, 1, 1)),
        (0.50, 0.4 / 181 * 1.2, (0, 1, 1)),
        (0.50, 0.4 / 241 * 1.2, (0, 0, 0)),
        (0.95, 0.001, (2, 2, 2)),
    ],
)
def test_memory_level_depends_on_usage_and_growth(
    used: float, growth: float, levels: tuple[int, int, int]
) -> None:
    assert (
        tuple(metric_levels.memory_level(filling(used, growth), previous, NOW) for previous in (0, 1, 2))
        == levels
    )


def test_seconds_until_memory_full_follow_growth() -> None:
    assert metric_levels.seconds_until_memory_full(0.6, 0.01) == pytest.approx(30)
    assert metric_levels.seconds_until_memory_full(0.95, 0.01) == 0
    assert (
        metric_levels.seconds_until_memory_full(0.6, 0.0)
        == metric_levels.seconds_until_memory_full(0.6, -1.0)
        == math.inf
    )
    assert metric_levels.is_memory_urgent(filling(0.6, 0.01), NOW)
    assert not metric_levels.is_memory_urgent(filling(0.9), NOW)


def test_stale_metrics_are_ignored() -> None:
    old = NodeMetrics(
        cpu=MetricValue(0.5, NOW - 121),
        memory=MetricValue(0.9, NOW - 61),
        pd_failures=MetricValue(1.0, NOW - 61),
        tikv_failures=MetricValue(1.0, NOW - 61),
    )
    assert (
        metric_levels.cpu_usage(old, NOW),
        metric_levels.memory_level(old, 2, NOW),
        metric_levels.health_level(old, 2, NOW),
    ) == (None, None, None)
    assert (
        metric_levels.failure_summary(old, NOW, above=0.1),
        metric_levels.memory_summary(old, NOW),
        metric_levels.failure_summary(old, NOW),
    ) == ("", "", "")
    assert metric_levels.cpu_usage(old, NOW - 1) == 0.5


def test_describes_levels() -> None:
    assert (
        metric_levels.failure_summary(failing(0.5, 0.05), NOW, above=0.1)
        == "50 failures per 100 requests to PD"
    )
    assert metric_levels.failure_summary(failing(0.5, 0.05), NOW) == (
        "50 failures per 100 requests to PD and 5 failures per 100 requests to TiKV"
    )
    assert metric_levels.memory_summary(filling(0.8), NOW) == "80% of its memory is in use"
    assert metric_levels.memory_summary(filling(0.6, 0.01), NOW) == (
        "60% of its memory is in use, and it runs out in 30 s at this rate"
    )


def test_node_without_a_known_memory_usage_may_be_abnormal() -> None:
    metrics = failing(0.0, 0.0)
    assert not metric_levels.is_certainly_normal(metrics, NOW)
    assert metric_levels.is_certainly_normal(replace(metrics, memory=MetricValue(0.1, NOW)), NOW)


@given(node_metrics, st.sampled_from((0, 1, 2)))
def test_is_certainly_normal_implies_level_zero(metrics: NodeMetrics, previous: int) -> None:
    if metric_levels.is_certainly_normal(metrics, NOW):
        assert (
            metric_levels.health_level(metrics, previous, NOW),
            metric_levels.memory_level(metrics, previous, NOW),
        ) == (
            0,
            0,
        )


@given(node_metrics, st.sampled_from((0, 1, 2)))
def test_level_is_stable_for_unchanged_metrics(metrics: NodeMetrics, previous: int) -> None:
    for level_of in (metric_levels.health_level, metric_levels.memory_level):
        level = level_of(metrics, previous, NOW)
        assert level is None or level_of(metrics, level, NOW) == level


def test_current_metrics_drop_stale_values() -> None:
    metrics = NodeMetrics(
        cpu=MetricValue(0.5, NOW),
        cpu_quota=4,
        memory=MetricValue(0.9, NOW),
        tikv_failures=MetricValue(0, NOW),
    )
    assert metric_levels.current_metrics(metrics, NOW + 60) == metrics
    assert metric_levels.current_metrics(metrics, NOW + 120) == NodeMetrics(
        cpu=MetricValue(0.5, NOW), cpu_quota=4
    )
    assert metric_levels.current_metrics(metrics, NOW + 121) is None

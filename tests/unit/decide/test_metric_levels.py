"""Levels of vital signs: their bounds, and what lies between the bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance import metric_levels
from controlplane.model.node_metrics import MetricValue, NodeMetrics

NOW = 1000.0

ratios = st.none() | st.builds(MetricValue, st.floats(0, 2), st.floats(NOW - 150, NOW))
vitals = st.builds(
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
def test_the_worse_of_pd_and_tikv_makes_the_level_of_health(
    pd: float | None, tikv: float | None, level: int | None
) -> None:
    for was in (0, 2):
        assert metric_levels.health_level(failing(pd, tikv), was, NOW) == level


@pytest.mark.parametrize(("pd", "tikv"), [(0.49, 0.0), (0.11, 0.29), (0.0, 0.11), (None, 0.2)])
def test_between_its_bounds_health_stays_as_it_was(pd: float | None, tikv: float | None) -> None:
    assert [metric_levels.health_level(failing(pd, tikv), was, NOW) for was in (0, 2)] == [0, 2]


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
def test_memory_goes_by_what_is_used_and_by_how_soon_it_is_all(
    used: float, growth: float, levels: tuple[int, int, int]
) -> None:
    assert tuple(metric_levels.memory_level(filling(used, growth), was, NOW) for was in (0, 1, 2)) == levels


def test_seconds_left_are_told_from_growth() -> None:
    assert metric_levels.seconds_until_memory_full(0.6, 0.01) == pytest.approx(30)
    assert metric_levels.seconds_until_memory_full(0.95, 0.01) == 0
    assert (
        metric_levels.seconds_until_memory_full(0.6, 0.0)
        == metric_levels.seconds_until_memory_full(0.6, -1.0)
        == math.inf
    )
    assert metric_levels.is_memory_urgent(filling(0.6, 0.01), NOW)
    assert not metric_levels.is_memory_urgent(filling(0.9), NOW)


def test_a_reading_that_is_old_says_nothing() -> None:
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
        metric_levels.failure_reason(old, NOW),
        metric_levels.memory_summary(old, NOW),
        metric_levels.failure_summary(old, NOW),
    ) == ("", "", "")
    assert metric_levels.cpu_usage(old, NOW - 1) == 0.5


def test_levels_are_told_in_words() -> None:
    assert metric_levels.failure_reason(failing(0.5, 0.05), NOW) == "50 failures for each 100 requests to PD"
    assert metric_levels.failure_summary(failing(0.5, 0.05), NOW) == (
        "50 failures for each 100 requests to PD and 5 failures for each 100 requests to TiKV"
    )
    assert metric_levels.memory_summary(filling(0.8), NOW) == "80% of its memory is in use"
    assert metric_levels.memory_summary(filling(0.6, 0.01), NOW) == (
        "60% of its memory is in use, and none is left in 30 s at this pace"
    )


@given(vitals, st.sampled_from((0, 1, 2)))
def test_who_is_calm_has_no_level_whatever_it_had(known: NodeMetrics, was: int) -> None:
    if metric_levels.is_normal(known, NOW):
        assert (metric_levels.health_level(known, was, NOW), metric_levels.memory_level(known, was, NOW)) == (
            0,
            0,
        )


@given(vitals, st.sampled_from((0, 1, 2)))
def test_a_level_stands_while_nothing_changes(known: NodeMetrics, was: int) -> None:
    for judge in (metric_levels.health_level, metric_levels.memory_level):
        level = judge(known, was, NOW)
        assert level is None or judge(known, level, NOW) == level


def test_of_vitals_that_grow_old_what_is_left_is_current() -> None:
    known = NodeMetrics(
        cpu=MetricValue(0.5, NOW),
        cpu_quota=4,
        memory=MetricValue(0.9, NOW),
        tikv_failures=MetricValue(0, NOW),
    )
    assert metric_levels.current_metrics(known, NOW + 60) == known
    assert metric_levels.current_metrics(known, NOW + 120) == NodeMetrics(
        cpu=MetricValue(0.5, NOW), cpu_quota=4
    )
    assert metric_levels.current_metrics(known, NOW + 121) is None

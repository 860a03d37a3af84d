"""The points of charts: rates from counts that only grow, and gaps where nobody can know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.console.history import INTERVAL_SECONDS, MAX_POINTS, History, HistoryPoint, TrafficSample, to_columns
from controlplane.model.traffic import EMPTY_BUCKETS

ONE = frozenset({"envoy-1"})


def buckets(*counts: int) -> tuple[int, ...]:
    """Cumulative counts; the last goes on to the end."""
    return (*counts, *((counts[-1],) * (len(EMPTY_BUCKETS) - len(counts))))


def test_a_rate_is_of_the_time_since_the_point_before() -> None:
    history = History()
    history.put("a", 100.0, TrafficSample(3, 1000, buckets(0, 1000)), ONE)
    history.put("a", 105.0, TrafficSample(4, 1050, buckets(0, 1050)), ONE)
    assert history.points("a") == (
        HistoryPoint(100.0, 3),
        HistoryPoint(105.0, 4, 10.0, 0.0005 + 0.0005 * 0.95),
    )
    assert history.latest("a") == history.points("a")[-1]


def test_the_percentile_forgets_what_was_before() -> None:
    history = History()
    history.put("a", 0.0, TrafficSample(1, 1000, buckets(1000)), ONE)
    history.put("a", 5.0, TrafficSample(1, 1100, buckets(1000, 1000, 1000, 1100)), ONE)
    latest = history.latest("a")
    assert latest is not None
    assert latest.p95 == pytest.approx(0.0025 + 0.0025 * 0.95)


def test_nothing_is_told_over_a_gap_an_envoy_that_came_or_one_that_began_anew() -> None:
    history = History()
    history.put("a", 0.0, TrafficSample(1, 1000), ONE)
    history.put("a", 5.0, TrafficSample(1, 9000), ONE | {"envoy-2"})  # it came with its counts
    history.put("a", 10.0, TrafficSample(1, 9010), ONE | {"envoy-2"})
    history.put("a", 15.0, TrafficSample(1, 10), ONE | {"envoy-2"})  # one was restarted
    history.put("a", 15.0 + 10 * INTERVAL_SECONDS, TrafficSample(1, 20), ONE | {"envoy-2"})  # we slept
    history.put("a", 20.0 + 10 * INTERVAL_SECONDS, TrafficSample(None, None), frozenset())
    assert [point.rate for point in history.points("a")] == [None, None, 2.0, None, None, None]


def test_a_quiet_node_has_a_rate_and_no_percentile() -> None:
    history = History()
    for at in (0.0, 5.0):
        history.put("a", at, TrafficSample(0, 7, buckets(7)), ONE)
    assert history.latest("a") == HistoryPoint(5.0, 0, 0.0, None)


def test_what_comes_late_is_left_out() -> None:
    history = History()
    for at in (5.0, 5.0, 4.0):
        history.put("a", at, TrafficSample(1, 1), ONE)
    assert [point.at for point in history.points("a")] == [5.0]


def test_memory_is_bounded() -> None:
    history = History()
    for turn in range(3 * MAX_POINTS):
        for name in ("a", "b"):
            history.put(name, float(turn), TrafficSample(turn, turn), ONE)
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
def test_no_counts_make_a_point_that_cannot_be(
    given_counts: list[tuple[float, TrafficSample, frozenset[str]]],
) -> None:
    history = History(max_points=5)
    for at, count, tellers in given_counts:
        history.put("a", at, replace(count), tellers)
    points = history.points("a")
    assert [point.at for point in points] == sorted({point.at for point in points})
    assert all(point.rate is None or point.rate >= 0 for point in points)
    assert all(point.p95 is None or point.p95 >= 0 for point in points)
    assert {len(column) for column in to_columns(points).values()} == {len(points)}

"""From samples of counters to vital signs."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.node_metrics import CounterSample, MetricValue, NodeMetrics
from controlplane.observe.node_metrics.rates import append_sample, compute_node_metrics, failure_ratio


def history(*samples: CounterSample) -> tuple[CounterSample, ...]:
    seen: tuple[CounterSample, ...] = ()
    for sample in samples:
        seen = append_sample(seen, sample)
    return seen


def every(seconds: float, count: int, **growing: float) -> tuple[CounterSample, ...]:
    """Counters that grow by so much a second, of a node with four cores and 100 bytes."""

    def sample(since: float) -> CounterSample:
        grown = {part: pace * since for part, pace in growing.items()}
        return CounterSample(1000.0 + since, cpu_quota=4.0, memory_quota_bytes=100.0, **grown)

    return history(*(sample(seconds * number) for number in range(count)))


def about(value: float, at: float) -> MetricValue:
    """A reading that equals those near it."""
    return MetricValue(cast(float, pytest.approx(value)), at)


def values(of: NodeMetrics) -> dict[str, float | None]:
    parts = {"cpu": of.cpu, "memory": of.memory, "pd": of.pd_failures, "tikv": of.tikv_failures}
    return {name: part.value if part is not None else None for name, part in parts.items()}


def test_of_nothing_nothing_is_known() -> None:
    assert compute_node_metrics(()) == compute_node_metrics((CounterSample(5.0),)) == NodeMetrics()


def test_cpu_is_time_used_over_time_and_quota() -> None:
    found = compute_node_metrics(every(5.0, 4, cpu_seconds=3.0))
    assert found.cpu == about(0.75, 1015.0)
    assert found.cpu_quota == 4.0


def test_cpu_is_that_of_the_last_30_seconds() -> None:
    calm = every(5.0, 20, cpu_seconds=0.0)
    last = calm[-1]
    busy = calm
    for number in range(1, 7):
        at = last.at + 5.0 * number
        busy = append_sample(busy, CounterSample(at, cpu_seconds=4.0 * 5.0 * number, cpu_quota=4.0))
        assert compute_node_metrics(busy).cpu == about(number / 6, at)


def test_cpu_takes_samples_a_second_apart() -> None:
    assert compute_node_metrics(every(0.4, 3, cpu_seconds=1.0)).cpu is None
    assert compute_node_metrics(every(0.5, 3, cpu_seconds=1.0)).cpu is not None


def test_cpu_goes_by_the_last_two_samples_where_they_are_rarer_than_that() -> None:
    assert values(compute_node_metrics(every(60.0, 5, cpu_seconds=2.0)))["cpu"] == pytest.approx(0.5)


@pytest.mark.parametrize("quota", [None, 0.0])
def test_without_a_quota_neither_cpu_nor_memory_is_known(quota: float | None) -> None:
    samples = history(
        *(
            CounterSample(at, cpu_seconds=at, cpu_quota=quota, memory_bytes=at, memory_quota_bytes=quota)
            for at in (0.0, 20.0)
        )
    )
    assert compute_node_metrics(samples) == NodeMetrics()


def test_a_ratio_beyond_all_numbers_is_not_known() -> None:
    """JSON has no infinity, and no share is made of it: a node must not spoil the answer for all others."""
    almost = 1e-300
    parts = {"cpu_seconds": 1e10, "memory_bytes": 1e10, "pd_failures": 1e10, "pd_requests": almost}
    samples = history(
        CounterSample(1000.0, cpu_quota=almost, memory_quota_bytes=almost, **dict.fromkeys(parts, 0.0)),
        CounterSample(1005.0, cpu_quota=almost, memory_quota_bytes=almost, **parts),
    )
    assert set(values(compute_node_metrics(samples)).values()) == {None}


def test_memory_is_that_of_the_newest_sample_and_its_growth_that_of_10_seconds() -> None:
    found = compute_node_metrics(every(5.0, 5, memory_bytes=2.0))
    assert found.memory == about(0.4, 1020.0)
    assert found.memory_growth == pytest.approx(0.02)
    shrinks = append_sample(
        every(5.0, 5, memory_bytes=2.0), CounterSample(1025.0, memory_bytes=0.0, memory_quota_bytes=100.0)
    )
    # Since the newest one that is 10 s older: 30 bytes in 10 s.
    assert compute_node_metrics(shrinks).memory_growth == pytest.approx(-0.03)
    assert compute_node_metrics(every(9.9, 2, memory_bytes=2.0)).memory_growth == 0.0


def test_failures_are_counted_over_two_minutes() -> None:
    samples = every(30.0, 3, pd_requests=10.0, pd_failures=5.0, tikv_requests=10.0, tikv_failures=30.0)
    assert values(compute_node_metrics(samples)) == {"cpu": None, "memory": None, "pd": 0.5, "tikv": 3.0}
    last = samples[-1]
    for number in range(1, 10):
        at = last.at + 30.0 * number
        samples = append_sample(
            samples,
            CounterSample(
                at, pd_requests=(last.pd_requests or 0) + 300.0 * number, pd_failures=last.pd_failures
            ),
        )
        found = compute_node_metrics(samples).pd_failures
        assert found is not None
        assert found.at == at
        assert (found.value == 0.0) is (number >= 4)


@pytest.mark.parametrize(
    ("failures", "requests", "ratio"), [(0.0, 0.0, 0.0), (0.0, 9.0, 0.0), (3.0, 0.0, 1.0), (3.0, 6.0, 0.5)]
)
def test_failures_without_a_request_count_as_all(failures: float, requests: float, ratio: float) -> None:
    assert failure_ratio(failures, requests) == ratio


@pytest.mark.parametrize("missing", ["pd_requests", "pd_failures"])
def test_failures_are_not_known_without_one_of_the_two(missing: str) -> None:
    both = {"pd_requests": 10.0, "pd_failures": 5.0, "tikv_requests": 10.0, "tikv_failures": 0.0}
    found = compute_node_metrics(
        every(5.0, 3, **{name: pace for name, pace in both.items() if name != missing})
    )
    assert (found.pd_failures, found.tikv_failures) == (None, MetricValue(0.0, 1010.0))


def test_what_the_newest_sample_lacks_is_not_known() -> None:
    samples = every(5.0, 5, cpu_seconds=1.0, memory_bytes=1.0, pd_requests=1.0, pd_failures=1.0)
    assert None not in (
        compute_node_metrics(samples).cpu,
        compute_node_metrics(samples).memory,
        compute_node_metrics(samples).pd_failures,
    )
    assert compute_node_metrics(append_sample(samples, CounterSample(1025.0))) == NodeMetrics()


@pytest.mark.parametrize("counter", ["cpu_seconds", "pd_requests", "tikv_failures"])
def test_after_a_restart_nothing_from_before_counts(counter: str) -> None:
    running = dict.fromkeys(
        ("cpu_seconds", "pd_requests", "pd_failures", "tikv_requests", "tikv_failures"), 1.0
    )
    samples = every(5.0, 5, **running)
    counts: dict[str, Any] = dict.fromkeys(running, 1e6) | {counter: 0.5}
    again = append_sample(samples, CounterSample(1025.0, cpu_quota=4.0, **counts))
    assert len(again) == 1
    assert values(compute_node_metrics(again)) == dict.fromkeys(("cpu", "memory", "pd", "tikv"))
    later = {name: count + 2.0 for name, count in counts.items()}
    assert values(compute_node_metrics(append_sample(again, CounterSample(1030.0, cpu_quota=4.0, **later))))[
        "cpu"
    ] == pytest.approx(0.1)


def test_a_sample_that_lacks_a_counter_hides_no_restart() -> None:
    samples = append_sample(every(5.0, 5, cpu_seconds=1.0), CounterSample(1025.0, cpu_quota=4.0))
    again = CounterSample(1030.0, cpu_quota=4.0, cpu_seconds=1.0)
    assert append_sample(samples, again) == (again,)


def test_what_was_sampled_over_two_minutes_ago_does_not_count() -> None:
    samples = every(5.0, 60, cpu_seconds=1.0)
    assert samples[0].at == samples[-1].at - 120.0
    assert append_sample(samples, CounterSample(5000.0, cpu_seconds=1e4)) == (
        CounterSample(5000.0, cpu_seconds=1e4),
    )


def test_a_sample_that_is_not_newer_is_left_out() -> None:
    samples = every(5.0, 2, cpu_seconds=1.0)
    assert append_sample(samples, CounterSample(1005.0, cpu_seconds=7.0)) == samples


COUNTS = st.none() | st.floats(0, 1e300)
SAMPLES = st.lists(
    st.tuples(st.floats(0, 1e6), *([COUNTS] * 8)).map(lambda parts: CounterSample(*parts)), max_size=40
)


@given(SAMPLES)
def test_whatever_is_counted_nothing_known_is_below_zero_or_older_than_the_newest_sample(
    samples: list[CounterSample],
) -> None:
    seen = history(*samples)
    found = compute_node_metrics(seen)
    for reading in (found.cpu, found.memory, found.pd_failures, found.tikv_failures):
        assert reading is None or (reading.value >= 0.0 and reading.at == seen[-1].at)

"""Node metrics, computed from counter samples."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.node_metrics import CounterSample, MetricValue, NodeMetrics
from controlplane.observe.node_metrics.rates import append_sample, compute_node_metrics, failure_ratio


def history(*samples: CounterSample) -> tuple[CounterSample, ...]:
    kept: tuple[CounterSample, ...] = ()
    for sample in samples:
        kept = append_sample(kept, sample)
    return kept


def samples_with_rates(seconds: float, count: int, **per_second: float) -> tuple[CounterSample, ...]:
    """Return samples of a node with 4 cores and 100 bytes of memory whose counters grow by `per_second`."""

    def sample(elapsed: float) -> CounterSample:
        counters = {field: rate * elapsed for field, rate in per_second.items()}
        return CounterSample(1000.0 + elapsed, cpu_quota=4.0, memory_quota_bytes=100.0, **counters)

    return history(*(sample(seconds * number) for number in range(count)))


def approximately(value: float, at: float) -> MetricValue:
    """Return a metric value that compares equal to any approximately equal value at the same time."""
    return MetricValue(cast(float, pytest.approx(value)), at)


def values(node: NodeMetrics) -> dict[str, float | None]:
    metrics = {"cpu": node.cpu, "memory": node.memory, "pd": node.pd_failures, "tikv": node.tikv_failures}
    return {name: metric.value if metric is not None else None for name, metric in metrics.items()}


def test_no_counters_give_no_metrics() -> None:
    assert compute_node_metrics(()) == compute_node_metrics((CounterSample(5.0),)) == NodeMetrics()


def test_cpu_is_used_time_per_time_and_quota() -> None:
    metrics = compute_node_metrics(samples_with_rates(5.0, 4, cpu_seconds=3.0))
    assert metrics.cpu == approximately(0.75, 1015.0)
    assert metrics.cpu_quota == 4.0


def test_cpu_covers_the_last_30_seconds() -> None:
    idle = samples_with_rates(5.0, 20, cpu_seconds=0.0)
    last = idle[-1]
    busy = idle
    for number in range(1, 7):
        at = last.at + 5.0 * number
        busy = append_sample(busy, CounterSample(at, cpu_seconds=4.0 * 5.0 * number, cpu_quota=4.0))
        assert compute_node_metrics(busy).cpu == approximately(number / 6, at)


def test_cpu_needs_samples_a_second_apart() -> None:
    assert compute_node_metrics(samples_with_rates(0.4, 3, cpu_seconds=1.0)).cpu is None
    assert compute_node_metrics(samples_with_rates(0.5, 3, cpu_seconds=1.0)).cpu is not None


def test_cpu_uses_the_last_two_samples_if_they_are_rare() -> None:
    assert values(compute_node_metrics(samples_with_rates(60.0, 5, cpu_seconds=2.0)))["cpu"] == pytest.approx(
        0.5
    )


@pytest.mark.parametrize("quota", [None, 0.0])
def test_cpu_and_memory_need_a_quota(quota: float | None) -> None:
    samples = history(
        *(
            CounterSample(at, cpu_seconds=at, cpu_quota=quota, memory_bytes=at, memory_quota_bytes=quota)
            for at in (0.0, 20.0)
        )
    )
    assert compute_node_metrics(samples) == NodeMetrics()


def test_infinite_ratio_is_unknown() -> None:
    """JSON has no infinity: an infinite ratio of one node would break the API response for all nodes."""
    almost_zero = 1e-300
    counters = {"cpu_seconds": 1e10, "memory_bytes": 1e10, "pd_failures": 1e10, "pd_requests": almost_zero}
    samples = history(
        CounterSample(
            1000.0, cpu_quota=almost_zero, memory_quota_bytes=almost_zero, **dict.fromkeys(counters, 0.0)
        ),
        CounterSample(1005.0, cpu_quota=almost_zero, memory_quota_bytes=almost_zero, **counters),
    )
    assert set(values(compute_node_metrics(samples)).values()) == {None}


def test_memory_growth_covers_10_seconds() -> None:
    metrics = compute_node_metrics(samples_with_rates(5.0, 5, memory_bytes=2.0))
    assert metrics.memory == approximately(0.4, 1020.0)
    assert metrics.memory_growth == pytest.approx(0.02)
    shrinking = append_sample(
        samples_with_rates(5.0, 5, memory_bytes=2.0),
        CounterSample(1025.0, memory_bytes=0.0, memory_quota_bytes=100.0),
    )
    # The baseline, the newest sample that is at least 10 s older than the last one, has 30 bytes.
    assert compute_node_metrics(shrinking).memory_growth == pytest.approx(-0.03)
    assert compute_node_metrics(samples_with_rates(9.9, 2, memory_bytes=2.0)).memory_growth == 0.0


def test_failure_ratios_cover_two_minutes() -> None:
    samples = samples_with_rates(
        30.0, 3, pd_requests=10.0, pd_failures=5.0, tikv_requests=10.0, tikv_failures=30.0
    )
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
        metrics = compute_node_metrics(samples).pd_failures
        assert metrics is not None
        assert metrics.at == at
        assert (metrics.value == 0.0) is (number >= 4)


@pytest.mark.parametrize(
    ("failures", "requests", "ratio"), [(0.0, 0.0, 0.0), (0.0, 9.0, 0.0), (3.0, 0.0, 1.0), (3.0, 6.0, 0.5)]
)
def test_failures_without_requests_have_ratio_one(failures: float, requests: float, ratio: float) -> None:
    assert failure_ratio(failures, requests) == ratio


@pytest.mark.parametrize("missing", ["pd_requests", "pd_failures"])
def test_failure_ratio_needs_both_counters(missing: str) -> None:
    rates = {"pd_requests": 10.0, "pd_failures": 5.0, "tikv_requests": 10.0, "tikv_failures": 0.0}
    metrics = compute_node_metrics(
        samples_with_rates(5.0, 3, **{name: rate for name, rate in rates.items() if name != missing})
    )
    assert (metrics.pd_failures, metrics.tikv_failures) == (None, MetricValue(0.0, 1010.0))


def test_metrics_need_counters_in_the_newest_sample() -> None:
    samples = samples_with_rates(5.0, 5, cpu_seconds=1.0, memory_bytes=1.0, pd_requests=1.0, pd_failures=1.0)
    assert None not in (
        compute_node_metrics(samples).cpu,
        compute_node_metrics(samples).memory,
        compute_node_metrics(samples).pd_failures,
    )
    assert compute_node_metrics(append_sample(samples, CounterSample(1025.0))) == NodeMetrics()


@pytest.mark.parametrize("counter", ["cpu_seconds", "pd_requests", "tikv_failures"])
def test_restart_discards_older_samples(counter: str) -> None:
    running = dict.fromkeys(
        ("cpu_seconds", "pd_requests", "pd_failures", "tikv_requests", "tikv_failures"), 1.0
    )
    samples = samples_with_rates(5.0, 5, **running)
    counts: dict[str, Any] = dict.fromkeys(running, 1e6) | {counter: 0.5}
    restarted = append_sample(samples, CounterSample(1025.0, cpu_quota=4.0, **counts))
    assert len(restarted) == 1
    assert values(compute_node_metrics(restarted)) == dict.fromkeys(("cpu", "memory", "pd", "tikv"))
    later = {name: count + 2.0 for name, count in counts.items()}
    assert values(
        compute_node_metrics(append_sample(restarted, CounterSample(1030.0, cpu_quota=4.0, **later)))
    )["cpu"] == pytest.approx(0.1)


def test_restart_is_detected_despite_a_missing_counter() -> None:
    samples = append_sample(samples_with_rates(5.0, 5, cpu_seconds=1.0), CounterSample(1025.0, cpu_quota=4.0))
    restarted = CounterSample(1030.0, cpu_quota=4.0, cpu_seconds=1.0)
    assert append_sample(samples, restarted) == (restarted,)


def test_samples_older_than_two_minutes_are_dropped() -> None:
    samples = samples_with_rates(5.0, 60, cpu_seconds=1.0)
    assert samples[0].at == samples[-1].at - 120.0
    assert append_sample(samples, CounterSample(5000.0, cpu_seconds=1e4)) == (
        CounterSample(5000.0, cpu_seconds=1e4),
    )


def test_sample_that_is_not_newer_is_ignored() -> None:
    samples = samples_with_rates(5.0, 2, cpu_seconds=1.0)
    assert append_sample(samples, CounterSample(1005.0, cpu_seconds=7.0)) == samples


COUNTS = st.none() | st.floats(0, 1e300)
SAMPLES = st.lists(
    st.tuples(st.floats(0, 1e6), *([COUNTS] * 8)).map(lambda fields: CounterSample(*fields)), max_size=40
)


@given(SAMPLES)
def test_metrics_are_current_and_not_negative(
    samples: list[CounterSample],
) -> None:
    kept = history(*samples)
    metrics = compute_node_metrics(kept)
    for metric in (metrics.cpu, metrics.memory, metrics.pd_failures, metrics.tikv_failures):
        assert metric is None or (metric.value >= 0.0 and metric.at == kept[-1].at)

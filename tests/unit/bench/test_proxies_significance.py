"""Intervals and verdicts of proxy comparisons, from synthetic measurements."""

from __future__ import annotations

import random

import pytest

from bench.proxies.significance import LatencyDifference, Ratio, RatioVerdict, overall_verdict


def noisy(centre: float, spread: float, seed: int, blocks: int = 80) -> list[float]:
    dice = random.Random(seed)
    return [centre * dice.lognormvariate(0, spread) for _ in range(blocks)]


def test_common_noise_cancels_out() -> None:
    machine = noisy(1.0, 0.5, 1)
    ratio = Ratio.of([1.07 * value for value in machine], machine)
    assert ratio.value == pytest.approx(1.07)
    assert ratio.max_deviation == pytest.approx(0.07)


def test_interval_contains_the_truth_and_shrinks() -> None:
    few, many = (Ratio.of(noisy(1.05, 0.04, 2, count), noisy(1.0, 0.04, 3, count)) for count in (20, 400))
    for ratio in (few, many):
        assert ratio.low < 1.05 < ratio.high
        assert ratio.low < ratio.value < ratio.high
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_equal_proxies_rarely_differ() -> None:
    verdicts = [
        Ratio.of(noisy(1.0, 0.06, 2 * seed), noisy(1.0, 0.06, 2 * seed + 1)).verdict for seed in range(50)
    ]
    assert sum(verdict in (RatioVerdict.WORSE, RatioVerdict.BETTER) for verdict in verdicts) <= 1


def test_few_disturbed_blocks_are_ignored() -> None:
    values = noisy(1.0, 0.01, 4)
    values[:6] = [value * 5 for value in values[:6]]
    assert Ratio.of(values, noisy(1.0, 0.01, 5)).verdict is RatioVerdict.EQUAL


@pytest.mark.parametrize(
    ("ratio", "verdict", "words"),
    [
        (Ratio(1.05, 1.03, 1.07), RatioVerdict.WORSE, "worse"),
        (Ratio(0.95, 0.93, 0.97), RatioVerdict.BETTER, "better"),
        (Ratio(1.01, 1.005, 1.015), RatioVerdict.EQUAL, "equal within 1.5 %"),
        (Ratio(0.99, 0.982, 0.997), RatioVerdict.EQUAL, "equal within 1.8 %"),
        (Ratio(1.03, 0.99, 1.049), RatioVerdict.EQUAL, "equal within 4.9 %"),
        (Ratio(1.03, 0.97, 1.09), RatioVerdict.UNCLEAR, "unclear: the interval is too wide"),
        (Ratio(1.20, 1.01, 1.40), RatioVerdict.WORSE, "worse"),
    ],
)
def test_verdict_depends_on_value_and_interval(ratio: Ratio, verdict: RatioVerdict, words: str) -> None:
    assert (ratio.verdict, ratio.describe_verdict()) == (verdict, words)


def test_rejects_unpaired_blocks() -> None:
    with pytest.raises(ValueError, match="3 and 4 blocks cannot be compared"):
        Ratio.of([1.0] * 3, [1.0] * 4)


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([], RatioVerdict.EQUAL),
        ([RatioVerdict.EQUAL, RatioVerdict.BETTER], RatioVerdict.BETTER),
        ([RatioVerdict.BETTER, RatioVerdict.UNCLEAR], RatioVerdict.UNCLEAR),
        ([RatioVerdict.UNCLEAR, RatioVerdict.WORSE, RatioVerdict.BETTER], RatioVerdict.WORSE),
    ],
)
def test_overall_verdict_is_the_worst(verdicts: list[RatioVerdict], verdict: RatioVerdict) -> None:
    assert overall_verdict(verdicts) is verdict


def test_latency_difference_has_an_interval() -> None:
    direct = [noisy(0.2, 0.3, seed, 200) for seed in range(20)]
    proxied = [[latency + 0.1 for latency in noisy(0.2, 0.3, 100 + seed, 200)] for seed in range(20)]
    added = LatencyDifference.of(proxied, direct, 0.95)
    assert added.low < 0.1 < added.high
    assert added.high - added.low < 0.05

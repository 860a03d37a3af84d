from collections.abc import Sequence

import pytest

from bench.targets import Target, chance, judged, told, verdict

AT_MOST = Target("Tidevoy", "cpu_us", 1.0)
AT_LEAST = Target("Tidevoy", "qps", 0.97, least=True)

MEASURED = {
    "HAProxy": {"qps": [100.0, 100.0, 80.0], "cpu_us": [10.0, 20.0, 40.0], "connection_kb": [4.0]},
    "again": {"qps": [100.0, 98.0, 80.0], "cpu_us": [10.0, 21.0, 39.0], "connection_kb": [3.0]},
    "Tidevoy": {"qps": [90.0, 90.0, 90.0], "cpu_us": [11.0, 18.0, 30.0], "connection_kb": [30.0]},
}


@pytest.mark.parametrize(("again", "off"), [([1.0, 1.02, 0.95], 0.05), ([1.0], 0.0), ([1.3, 0.9], 0.3)])
def test_chance_is_the_greatest_difference_of_equal_things(again: Sequence[float], off: float) -> None:
    assert chance(again) == pytest.approx(off)


@pytest.mark.parametrize(
    ("target", "value", "by_chance", "expected"),
    [
        (AT_MOST, 1.00, 0.00, "met"),
        (AT_MOST, 0.80, 0.50, "met"),
        (AT_MOST, 1.01, 0.02, "undecided"),
        (AT_MOST, 1.02, 0.02, "undecided"),
        (AT_MOST, 1.03, 0.02, "missed"),
        (AT_MOST, 1.01, 0.00, "missed"),
        (AT_LEAST, 0.97, 0.00, "met"),
        (AT_LEAST, 1.20, 0.00, "met"),
        (AT_LEAST, 0.96, 0.02, "undecided"),
        (AT_LEAST, 0.94, 0.02, "missed"),
    ],
)
def test_a_target_is_missed_when_it_is_exceeded_by_more_than_chance(
    target: Target, value: float, by_chance: float, expected: str
) -> None:
    assert verdict(target, value, by_chance) == expected


def test_targets_are_judged_by_the_median_ratio() -> None:
    cpu, rate = judged([AT_MOST, AT_LEAST], MEASURED, "HAProxy", "again")
    assert cpu == {
        "peer": "Tidevoy",
        "figure": "cpu_us",
        "bound": 1.0,
        "least": False,
        "alone": False,
        "value": pytest.approx(0.9),
        "chance": pytest.approx(0.05),
        "verdict": "met",
    }
    assert rate["verdict"] == "missed"
    assert told(rate, "QPS", "HAProxy") == (
        "missed: Tidevoy's QPS is 0.900 of HAProxy's; at least 0.97, and chance makes 0.020"
    )


def test_a_figure_may_be_judged_alone_and_chance_is_in_its_own_measure() -> None:
    [found] = judged([Target("Tidevoy", "connection_kb", 25, alone=True)], MEASURED, "HAProxy", "again")
    assert found["value"] == 30.0
    assert found["chance"] == pytest.approx(25 / 4)
    assert found["verdict"] == "undecided"
    assert told(found, "kB each", "HAProxy") == (
        "undecided: Tidevoy's kB each is 30.000; at most 25.00, and chance makes 6.250"
    )


@pytest.mark.parametrize(
    "target", [Target("Tidevoy", "user_us", 1.0), Target("absent", "cpu_us", 1.0, alone=True)]
)
def test_a_target_without_figures_is_none(target: Target) -> None:
    assert judged([target], MEASURED, "HAProxy", "again") == []

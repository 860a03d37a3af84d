import pytest

from bench.paired import added, paired_figures, rotated
from bench.sysbench import Outcome

# What sysbench 1.0.20 prints, shortened.
OUTPUT = """\
SQL statistics:
    queries performed:
        read:                            81234
        write:                           0
        other:                           0
        total:                           81234
    transactions:                        81234  (13538.20 per sec.)
    queries:                             81234  (13538.20 per sec.)
    ignored errors:                      0      (0.00 per sec.)

Latency (ms):
         min:                                    0.11
         avg:                                    0.29
         max:                                   17.43
         95th percentile:                        0.43
         sum:                                23877.12
"""


def test_only_costs_of_the_same_round_are_compared() -> None:
    # The machine is slower from round to round, which makes no difference.
    assert added([10.3, 20.6, 30.9], [10.0, 20.0, 30.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert added([9.0], [10.0]) == pytest.approx([-10.0])
    with pytest.raises(ValueError, match="shorter"):
        added([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("cost", "again", "verdict"),
    [
        (102.9, [100.5, 99.0, 100.0], "met"),
        (103.9, [100.5, 99.0, 100.0], "undecided"),  # 0.9 too much, and the A/A pair differs by 1.0
        (103.9, [100.5, 101.0, 100.0], "undecided"),
        (104.1, [100.5, 99.0, 100.0], "missed"),
        (103.1, [100.0, 100.0, 100.0], "missed"),
        (100.0, [100.0, 100.0, 96.9], "undecided"),  # an A/A pair that differs by more than the target
    ],
)
def test_a_difference_counts_when_it_exceeds_that_of_the_same_thing_with_itself(
    cost: float, again: list[float], verdict: str
) -> None:
    difference, chance = paired_figures("x", [cost] * 3, [100.0] * 3, again, target=3.0)
    assert difference.verdict == verdict
    assert difference.value == pytest.approx(cost - 100)
    assert (chance.name, chance.verdict) == ("x, A/A", "")


def test_the_figure_is_the_median_of_the_quotients_not_the_quotient_of_medians() -> None:
    difference, chance = paired_figures(
        "x", [11.0, 20.0, 60.0], [10.0, 20.0, 50.0], [10.0, 21.0, 50.0], target=3.0
    )
    assert difference.value == pytest.approx(10.0)
    assert chance.value == pytest.approx(0.0)
    assert difference.tolerance == pytest.approx(5.0)


def test_what_sysbench_counted_is_read() -> None:
    assert Outcome.read(OUTPUT) == Outcome(queries=81234, per_second=13538.2, p95=0.43)


@pytest.mark.parametrize("output", ["", "FATAL: no", OUTPUT.replace("81234", "0")])
def test_a_run_without_queries_is_none(output: str) -> None:
    assert Outcome.read(output) is None


def test_each_proxy_is_first_in_turn() -> None:
    assert [rotated("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]

"""Weights: what least connections over the fleet means, as properties."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.water_filling import (
    WeightedNode,
    compute_weights,
    min_volume,
    ramp,
    water_level,
    weight_ratio,
)

vessels = st.lists(
    st.builds(
        WeightedNode,
        address=st.just(""),
        capacity=st.integers(1, 10_000),
        sessions=st.none() | st.integers(0, 100_000),
        capacity_factor=st.floats(0.02, 1.0),
    ),
    min_size=1,
    max_size=50,
).map(
    lambda found: [
        WeightedNode(f"n{i}", v.capacity, v.sessions, v.capacity_factor) for i, v in enumerate(found)
    ]
)


@given(vessels, st.floats(0, 1e6))
def test_every_node_gets_a_weight_that_eds_can_carry(found: list[WeightedNode], expected: float) -> None:
    result = compute_weights(found, expected, {})
    assert result.keys() == {v.address for v in found}
    assert all(1 <= weight < 2**20 for weight in result.values())


@given(vessels, st.floats(0, 1e6))
def test_weights_that_were_computed_once_stand(found: list[WeightedNode], expected: float) -> None:
    first = compute_weights(found, expected, {})
    held = {v.address: weight_ratio(first[v.address], v.capacity) for v in found if v.capacity >= 100}
    again = compute_weights(found, expected, held)
    assert all(again[address] == pytest.approx(first[address], rel=0.2) for address in held)


@given(vessels, st.floats(0, 1e6))
def test_the_fuller_of_two_equal_nodes_never_gets_more(found: list[WeightedNode], expected: float) -> None:
    result = compute_weights(found, expected, {})
    for a, b in itertools.combinations(found, 2):
        if (
            a.capacity == b.capacity
            and a.capacity_factor == b.capacity_factor
            and a.sessions is not None
            and b.sessions is not None
        ):
            fuller, emptier = (a, b) if a.sessions >= b.sessions else (b, a)
            assert result[fuller.address] <= result[emptier.address]


@pytest.mark.parametrize("live", [[2000] * 49 + [0], [2000] * 49 + [1990], list(range(1950, 2050, 2))])
def test_no_node_gets_over_four_times_its_part_of_what_nobody_expected(live: list[int]) -> None:
    """As when all clients come back at once, or no more weights come."""
    result = compute_weights([WeightedNode(f"n{i}", 100, count) for i, count in enumerate(live)], 0.0, {})
    assert max(result.values()) <= 4.5 * sum(result.values()) / len(live)


@given(vessels, st.floats(1.5, 20), st.floats(1, 100))
def test_of_enough_water_and_of_more_no_vessel_takes_much_more_than_its_part(
    found: list[WeightedNode], most: float, times: float
) -> None:
    widths = [v.capacity * v.capacity_factor for v in found]
    filled = [float(v.sessions or 0) for v in found]
    poured = min_volume(widths, filled, most)
    lowest = min(f / w for f, w in zip(filled, widths, strict=True))

    def highest(water: float) -> float:
        """How many times its part of the water the emptiest takes."""
        return (water_level(widths, filled, water) - lowest) * sum(widths) / water

    assert highest(max(poured, 1.0) * times) <= most * 1.001 + 0.001
    if poured > 1.0:
        assert highest(poured) == pytest.approx(most, rel=0.001)


def test_equal_nodes_with_equal_load_weigh_the_same() -> None:
    result = compute_weights([WeightedNode(f"n{i}", 100, 7) for i in range(5)], 10, {})
    assert len(set(result.values())) == 1


def test_capacity_decides_between_empty_nodes() -> None:
    result = compute_weights([WeightedNode("big", 200, 0), WeightedNode("small", 100, 0)], 300, {})
    assert result["big"] == 2 * result["small"]


def test_an_unknown_count_is_neither_empty_nor_full() -> None:
    result = compute_weights(
        [WeightedNode("a", 100, 50), WeightedNode("b", 100, 50), WeightedNode("unknown", 100, None)], 10, {}
    )
    assert result["unknown"] == result["a"] == result["b"]


def test_noise_does_not_move_a_weight() -> None:
    base = [WeightedNode(f"n{i}", 100, 1000) for i in range(3)]
    first = compute_weights(base, 300, {})
    held = {v.address: weight_ratio(first[v.address], v.capacity) for v in base}
    noisy = [WeightedNode("n0", 100, 1010), WeightedNode("n1", 100, 995), WeightedNode("n2", 100, 1000)]
    assert compute_weights(noisy, 300, held) == first


def test_a_change_of_capacity_is_never_taken_for_noise() -> None:
    first = compute_weights([WeightedNode("a", 100, 0), WeightedNode("b", 100, 0)], 10, {})
    held = {address: weight_ratio(weight, 100) for address, weight in first.items()}
    changed = compute_weights([WeightedNode("a", 105, 0), WeightedNode("b", 100, 0)], 10, held)
    assert changed["a"] > first["a"]


def test_a_node_that_joins_starts_small_and_grows() -> None:
    shares = []
    for age in range(0, 31, 5):
        result = compute_weights(
            [WeightedNode("old", 100, 10), WeightedNode("new", 100, 10, ramp(age, 30))], 100, {}
        )
        shares.append(result["new"] / sum(result.values()))
    assert shares[0] < 0.15
    assert shares == sorted(shares)
    assert shares[-1] == 0.5


def test_nodes_that_all_just_started_are_equals() -> None:
    young = ramp(0, 30)
    assert compute_weights(
        [WeightedNode("a", 100, 0, young), WeightedNode("b", 100, 0, young)], 10, {}
    ) == compute_weights([WeightedNode("a", 100, 0), WeightedNode("b", 100, 0)], 10, {})


@pytest.mark.parametrize(
    ("age", "window", "expected"), [(0, 0, 1.0), (30, 30, 1.0), (-5, 30, 0.1), (15, 30, 0.55)]
)
def test_ramp(age: float, window: float, expected: float) -> None:
    assert ramp(age, window) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_levels_out_and_stays_level(seed: int) -> None:
    """200 rounds of arrivals by weight and random ends, with the counts of the round before."""
    dice = random.Random(seed)
    capacity = {"a": 100, "b": 100, "c": 200, "d": 50}
    live = {"a": 400, "b": 0, "c": 0, "d": 30}
    held: dict[str, float] = {}
    seen = dict(live)
    spread = []
    for _ in range(200):
        result = compute_weights([WeightedNode(n, capacity[n], seen[n]) for n in live], 60, held)
        held = {n: weight_ratio(result[n], capacity[n]) for n in live}
        seen = dict(live)
        for name in dice.choices(list(live), [result[n] for n in live], k=30):
            live[name] += 1
        for name in live:
            live[name] -= sum(dice.random() < 0.05 for _ in range(live[name]))
        level = [live[n] / capacity[n] for n in live]
        spread.append(max(level) / (sum(live.values()) / sum(capacity.values())))
    assert sum(spread[100:]) / 100 < 1.25

"""Properties of node weights, with which all Envoys together balance new sessions by least connections."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.water_filling import (
    WeightedNode,
    compute_weights,
    min_incoming_connections,
    ramp,
    water_level,
    weight_ratio,
)

node_lists = st.lists(
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
    lambda nodes: [
        WeightedNode(f"n{i}", n.capacity, n.sessions, n.capacity_factor) for i, n in enumerate(nodes)
    ]
)


@given(node_lists, st.floats(0, 1e6))
def test_every_weight_fits_eds(nodes: list[WeightedNode], expected: float) -> None:
    result = compute_weights(nodes, expected, {})
    assert result.keys() == {v.address for v in nodes}
    assert all(1 <= weight < 2**20 for weight in result.values())


@given(node_lists, st.floats(0, 1e6))
def test_weights_are_stable(nodes: list[WeightedNode], expected: float) -> None:
    first = compute_weights(nodes, expected, {})
    previous = {v.address: weight_ratio(first[v.address], v.capacity) for v in nodes if v.capacity >= 100}
    again = compute_weights(nodes, expected, previous)
    assert all(again[address] == pytest.approx(first[address], rel=0.2) for address in previous)


@given(node_lists, st.floats(0, 1e6))
def test_fuller_of_two_equal_nodes_never_weighs_more(nodes: list[WeightedNode], expected: float) -> None:
    result = compute_weights(nodes, expected, {})
    for a, b in itertools.combinations(nodes, 2):
        if (
            a.capacity == b.capacity
            and a.capacity_factor == b.capacity_factor
            and a.sessions is not None
            and b.sessions is not None
        ):
            fuller, emptier = (a, b) if a.sessions >= b.sessions else (b, a)
            assert result[fuller.address] <= result[emptier.address]


@pytest.mark.parametrize("sessions", [[2000] * 49 + [0], [2000] * 49 + [1990], list(range(1950, 2050, 2))])
def test_no_node_exceeds_four_times_its_share_of_a_burst(sessions: list[int]) -> None:
    """The same weights apply to many sessions if all clients reconnect at once, or if weight updates stop."""
    result = compute_weights([WeightedNode(f"n{i}", 100, count) for i, count in enumerate(sessions)], 0.0, {})
    assert max(result.values()) <= 4.5 * sum(result.values()) / len(sessions)


@given(node_lists, st.floats(1.5, 20), st.floats(1, 100))
def test_min_incoming_connections_bounds_every_share(
    nodes: list[WeightedNode], max_ratio: float, times: float
) -> None:
    capacities = [v.capacity * v.capacity_factor for v in nodes]
    current = [float(v.sessions or 0) for v in nodes]
    least = min_incoming_connections(capacities, current, max_ratio)
    lowest = min(f / w for f, w in zip(current, capacities, strict=True))

    def largest_ratio(incoming: float) -> float:
        """Return the emptiest node's share of the incoming sessions, divided by its share of the capacity."""
        return (water_level(capacities, current, incoming) - lowest) * sum(capacities) / incoming

    assert largest_ratio(max(least, 1.0) * times) <= max_ratio * 1.001 + 0.001
    if least > 1.0:
        assert largest_ratio(least) == pytest.approx(max_ratio, rel=0.001)


def test_equal_nodes_with_equal_load_weigh_the_same() -> None:
    result = compute_weights([WeightedNode(f"n{i}", 100, 7) for i in range(5)], 10, {})
    assert len(set(result.values())) == 1


def test_empty_nodes_weigh_by_capacity() -> None:
    result = compute_weights([WeightedNode("big", 200, 0), WeightedNode("small", 100, 0)], 300, {})
    assert result["big"] == 2 * result["small"]


def test_unknown_count_is_treated_as_average() -> None:
    result = compute_weights(
        [WeightedNode("a", 100, 50), WeightedNode("b", 100, 50), WeightedNode("unknown", 100, None)], 10, {}
    )
    assert result["unknown"] == result["a"] == result["b"]


def test_noise_does_not_change_weights() -> None:
    base = [WeightedNode(f"n{i}", 100, 1000) for i in range(3)]
    first = compute_weights(base, 300, {})
    previous = {v.address: weight_ratio(first[v.address], v.capacity) for v in base}
    noisy = [WeightedNode("n0", 100, 1010), WeightedNode("n1", 100, 995), WeightedNode("n2", 100, 1000)]
    assert compute_weights(noisy, 300, previous) == first


def test_capacity_change_always_changes_weight() -> None:
    first = compute_weights([WeightedNode("a", 100, 0), WeightedNode("b", 100, 0)], 10, {})
    previous = {address: weight_ratio(weight, 100) for address, weight in first.items()}
    changed = compute_weights([WeightedNode("a", 105, 0), WeightedNode("b", 100, 0)], 10, previous)
    assert changed["a"] > first["a"]


def test_ratio_one_step_off_does_not_stay() -> None:
    """Even if it is a little less than a step off, because the weight that it comes from is an integer."""
    idle = [WeightedNode("changed", 100, 0), WeightedNode("other", 100, 0)]
    previous = {"changed": weight_ratio(1902, 100), "other": 1.0}
    assert compute_weights(idle, 0.0, previous) == {"changed": 1600, "other": 1600}


def test_joining_node_ramps_up() -> None:
    shares = []
    for age in range(0, 31, 5):
        result = compute_weights(
            [WeightedNode("old", 100, 10), WeightedNode("new", 100, 10, ramp(age, 30))], 100, {}
        )
        shares.append(result["new"] / sum(result.values()))
    assert shares[0] < 0.15
    assert shares == sorted(shares)
    assert shares[-1] == 0.5


def test_nodes_started_together_weigh_the_same() -> None:
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
def test_fleet_converges_and_stays_balanced(seed: int) -> None:
    """Simulate 200 rounds: sessions arrive by weight and end at random. Counts are one round old."""
    rng = random.Random(seed)
    capacity = {"a": 100, "b": 100, "c": 200, "d": 50}
    sessions = {"a": 400, "b": 0, "c": 0, "d": 30}
    previous: dict[str, float] = {}
    reported = dict(sessions)
    spread = []
    for _ in range(200):
        result = compute_weights([WeightedNode(n, capacity[n], reported[n]) for n in sessions], 60, previous)
        previous = {n: weight_ratio(result[n], capacity[n]) for n in sessions}
        reported = dict(sessions)
        for name in rng.choices(list(sessions), [result[n] for n in sessions], k=30):
            sessions[name] += 1
        for name in sessions:
            sessions[name] -= sum(rng.random() < 0.05 for _ in range(sessions[name]))
        level = [sessions[n] / capacity[n] for n in sessions]
        spread.append(max(level) / (sum(sessions.values()) / sum(capacity.values())))
    assert sum(spread[100:]) / 100 < 1.25

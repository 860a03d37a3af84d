"""Apportionment of integers: sums, limits, fairness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.migration_batch import EnvoyTurn, apportion

holders = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 1000), max_size=9)


def test_remainder_goes_to_largest_fractions() -> None:
    turn = EnvoyTurn(0)
    assert apportion(10, {"a": 50, "b": 34, "c": 16}, turn) == {"a": 5, "b": 3, "c": 2}
    assert apportion(2, {"c": 1, "b": 1, "a": 1}, turn) == {"a": 1, "b": 1}
    assert apportion(7, {"a": 2, "b": 0}, turn) == {"a": 2}
    assert apportion(7, {}, turn) == apportion(0, {"a": 1}, turn) == apportion(-3, {"a": 1}, turn) == {}


def test_ties_rotate() -> None:
    held = {"c": 1, "a": 1, "b": 1}
    turns = [EnvoyTurn(number) for number in range(9)]
    assert [apportion(1, held, turn) for turn in turns[:4]] == [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 1}]
    assert [apportion(2, held, turn) for turn in turns[:3]] == [
        {"a": 1, "b": 1},
        {"b": 1, "c": 1},
        {"a": 1, "c": 1},
    ]
    assert {apportion(1, {"a": 9, "b": 1}, turn)["a"] for turn in turns} == {1}


@given(st.integers(1, 5), st.integers(0, 10**10))
def test_every_holder_gets_its_turn_after_rounds_without_effect(total: int, number: int) -> None:
    held = {"a": 9, "b": 5, "c": 3, "d": 1, "e": 1, "f": 1}
    asked = [apportion(total, held, EnvoyTurn(number, stalled)) for stalled in range(1, 7)]
    assert {name for shares in asked for name in shares} == set(held)


@given(st.integers(-5, 5000), holders, st.integers(0, 10**10), st.integers(0, 20))
def test_distributes_total_within_each_holding(
    total: int, held: dict[str, int], number: int, stalled_rounds: int
) -> None:
    shares = apportion(total, held, EnvoyTurn(number, stalled_rounds))
    whole = sum(held.values())
    assert sum(shares.values()) == max(0, min(total, whole))
    assert list(shares) == sorted(shares)
    for name, count in held.items():
        share = shares.get(name, 0)
        assert 0 <= share <= count
        assert whole == 0 or abs(share - min(max(total, 0), whole) * count / whole) < 1

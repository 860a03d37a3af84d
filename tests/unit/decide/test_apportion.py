"""Apportionment of integers: sums, limits, fairness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.migration_batch import apportion

holders = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 1000), max_size=9)


def test_remainder_goes_to_largest_fractions() -> None:
    assert apportion(10, {"a": 50, "b": 34, "c": 16}) == {"a": 5, "b": 3, "c": 2}
    assert apportion(2, {"c": 1, "b": 1, "a": 1}) == {"a": 1, "b": 1}
    assert apportion(7, {"a": 2, "b": 0}) == {"a": 2}
    assert apportion(7, {}) == apportion(0, {"a": 1}) == apportion(-3, {"a": 1}) == {}


def test_ties_rotate() -> None:
    held = {"c": 1, "a": 1, "b": 1}
    assert [apportion(1, held, rotation) for rotation in range(4)] == [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 1}]
    assert [apportion(2, held, rotation) for rotation in range(3)] == [
        {"a": 1, "b": 1},
        {"b": 1, "c": 1},
        {"a": 1, "c": 1},
    ]
    assert {apportion(1, {"a": 9, "b": 1}, rotation)["a"] for rotation in range(9)} == {1}


@given(st.integers(-5, 5000), holders, st.integers(0, 10**10))
def test_distributes_total_within_each_holding(total: int, held: dict[str, int], rotation: int) -> None:
    shares = apportion(total, held, rotation)
    whole = sum(held.values())
    assert sum(shares.values()) == max(0, min(total, whole))
    assert list(shares) == sorted(shares)
    for name, count in held.items():
        share = shares.get(name, 0)
        assert 0 <= share <= count
        assert whole == 0 or abs(share - min(max(total, 0), whole) * count / whole) < 1

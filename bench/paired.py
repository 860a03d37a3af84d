"""How much more one thing costs than another, where the machine's mood moves both: pairs of runs, and A/A.

In each round the thing in question, what it is compared with, and the latter a second time (A/A) take their
turns. Only the quotients within a round are looked at. Those of the A/A pair, which ought to be 1, show what
the quotients of this very run are worth: a difference that is not greater than theirs counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bench.report import Figure, Spread

_Turn = TypeVar("_Turn")


def rotated(names: Sequence[_Turn], by: int) -> list[_Turn]:
    """The order of a round: each is first in turn, so that none always follows the same rest or work."""
    first = by % len(names)
    return [*names[first:], *names[:first]]


def added(costs: Sequence[float], base: Sequence[float]) -> list[float]:
    """By how many percent each cost exceeds that of `base` in the same round; negative: it is less.

    ValueError when one of them has more rounds. Costs are above 0.
    """
    return [(cost / below - 1) * 100 for cost, below in zip(costs, base, strict=True)]


def paired_figures(
    name: str, costs: Sequence[float], base: Sequence[float], again: Sequence[float], *, target: float
) -> list[Figure]:
    """The median of what is added to `base`, judged by `target` (percent), and the same for the A/A pair.

    `again` is what `base` cost the second time. The greatest difference within the A/A pair, in any round, is
    what the target may be exceeded by without its being missed: see `Figure.tolerance`.
    """
    difference, chance = Spread.of(added(costs, base)), Spread.of(added(again, base))
    tolerance = max(abs(chance.low), abs(chance.high))
    return [
        Figure(name, difference.median, "%", target, difference, tolerance=tolerance),
        Figure(f"{name}, A/A", chance.median, "%", None, chance),
    ]

"""What a figure is to reach, and whether it does when chance has a part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Samples = Mapping[str, Sequence[float]]
"""Of one peer: by figure, what it was in each round."""

Verdict = Literal["met", "missed", "undecided"]


@dataclass(frozen=True, slots=True)
class Target:
    """The most that a figure of a peer may be in proportion to the reference's of the same round.

    `least`: not the most but the least. `alone`: the figure itself rather than its ratio.
    """

    peer: str
    figure: str
    bound: float
    least: bool = False
    alone: bool = False


def quotients(of: Samples, to: Samples) -> dict[str, list[float]]:
    """Each figure in proportion to that of `to` in the same round; without those that are 0 there."""
    return {
        name: [value / base for value, base in zip(values, to[name], strict=True)]
        for name, values in of.items()
        if name in to and all(to[name])
    }


def chance(again: Sequence[float]) -> float:
    """The most by which a quotient of equal things, in any round, was off 1."""
    return max(abs(quotient - 1) for quotient in again)


def verdict(target: Target, value: float, by_chance: float) -> Verdict:
    """A target is missed when it is exceeded by more than chance does; by less than that, it is undecided."""
    if value >= target.bound if target.least else value <= target.bound:
        return "met"
    missed = value < target.bound - by_chance if target.least else value > target.bound + by_chance
    return "missed" if missed else "undecided"


def judged(
    targets: Sequence[Target], measured: Mapping[str, Samples], reference: str, again: str
) -> list[dict[str, Any]]:
    """The targets of which there are figures, with their verdicts; `measured` by peer."""
    found = []
    for target in targets:
        values, equal = _judged_by(target, measured, reference, again)
        if not values or not equal:
            continue
        value, off = median(values), chance(equal) * (target.bound if target.alone else 1)
        found.append(
            {
                "peer": target.peer,
                "figure": target.figure,
                "bound": target.bound,
                "least": target.least,
                "alone": target.alone,
                "value": value,
                "chance": off,
                "verdict": verdict(target, value, off),
            }
        )
    return found


def _judged_by(
    target: Target, measured: Mapping[str, Samples], reference: str, again: str
) -> tuple[Sequence[float], Sequence[float]]:
    """What is judged, round by round, and the quotients of the A/A pair; empty where there is nothing."""
    own, base = measured.get(target.peer, {}), measured[reference]
    equal = quotients(measured[again], base).get(target.figure, [])
    if target.alone:
        return own.get(target.figure, []), equal
    return quotients(own, base).get(target.figure, []), equal


def told(target: Mapping[str, Any], head: str, reference: str) -> str:
    """A target of a document with its verdict, in a line; `head` is how the figure is called."""
    measured = f"{target['peer']}'s {head} is {target['value']:.3f}"
    of_reference = "" if target["alone"] else f" of {reference}'s"
    bound = "at least" if target["least"] else "at most"
    return (
        f"{target['verdict']}: {measured}{of_reference}; {bound} {target['bound']:.2f}, and chance makes"
        f" {target['chance']:.3f}"
    )

"""How the module in an Envoy picks a node, as `filters/module/src/policy.rs` does it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def least(added: Sequence[int], weights: Sequence[int], due: Sequence[float]) -> int | None:
    """The position of the node whose turn is first, of those that are not ahead.

    A node is ahead when another, given one session more, would still have no more for its weight. `added`:
    sessions that each got since its weight arrived (below 0: it lost some, which does not count); one of
    weight 0 may not be chosen; `due`: when the next turn of each is.
    """
    best, after, width = inf, 0, 0
    for more, weight in zip(added, weights, strict=True):
        if weight:
            following = more + 1 if more > 0 else 1
            if following / weight < best:
                best, after, width = following / weight, following, weight
    first, chosen = inf, None
    for position, turn in enumerate(due):
        if turn < first and (weight := weights[position]):
            more = added[position]
            if (more if more > 0 else 0) * width < after * weight:
                first, chosen = turn, position
    return chosen

"""How the module in an Envoy picks a node, as `filters/module/src/policy.rs` does it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def choose_node(
    added_sessions: Sequence[int], weights: Sequence[int], next_turns: Sequence[float]
) -> int | None:
    """The position of the node whose turn is first, of those that are not ahead.

    A node is ahead when another, given one session more, would still have no more for its weight. `added`:
    sessions that each got since its weight arrived (below 0: it lost some, which does not count); one of
    weight 0 may not be chosen; `due`: when the next turn of each is.
    """
    best, best_sessions, best_weight = inf, 0, 0
    for gained, weight in zip(added_sessions, weights, strict=True):
        if weight:
            following = gained + 1 if gained > 0 else 1
            if following / weight < best:
                best, best_sessions, best_weight = following / weight, following, weight
    first, chosen = inf, None
    for position, turn in enumerate(next_turns):
        if turn < first and (weight := weights[position]):
            gained = added_sessions[position]
            if (gained if gained > 0 else 0) * best_weight < best_sessions * weight:
                first, chosen = turn, position
    return chosen

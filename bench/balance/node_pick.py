"""The node pick of the Envoy module, as in `filters/module/src/policy.rs`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def choose_node(
    added_sessions: Sequence[int], weights: Sequence[int], next_turns: Sequence[float]
) -> int | None:
    """Return the position of the node with the earliest turn among those that are not ahead.

    A node is ahead if another one, after one more session, would still have no more sessions for its weight.
    `added_sessions`: sessions that each node gained since its weight arrived (negative values count as 0);
    `weights`: nodes of weight 0 are excluded; `next_turns`: the time of each node's next turn.
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

"""The values that are kept over restarts, and the formats in which they are written."""

from __future__ import annotations

from typing import Any

from controlplane.model.intents import Intents
from controlplane.model.rollout import Rollout
from controlplane.storage.store import SavedPlan
from controlplane.storage.versioned_codec import Envelope


def _of_format_1(content: Any) -> Any:
    """A plan whose round of moves named other things. A start forgets the round of before anyway."""
    match content:
        case {"plan": {"rebalance": dict(past), **plan}, **saved}:
            kept = {name: value for name, value in past.items() if name not in ("moves", "wants")}
            return {**saved, "plan": {**plan, "rebalance": kept}}
    return content


INTENTS = Envelope("intents", 1, Intents)
PLAN = Envelope("plan", 2, SavedPlan, {1: _of_format_1})
ROLLOUT = Envelope("rollout", 1, Rollout)

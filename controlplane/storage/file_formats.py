"""The saved values and their file formats, with upgrades from older formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import Rollout
from controlplane.storage.store import SavedPlan
from controlplane.storage.versioned_codec import VersionedCodec

_INTENTS_FROM_V1 = {"ended": "ended_envoys"}
_DRAIN_FROM_V1 = {"by": "owner"}
_PLAN_FROM_V2 = {
    "floor": "panic_threshold_reason",
    "weighed_at": "weights_computed_at",
    "full": "overloaded_zones",
}
_NODE_FROM_V2 = {"advice": "eds_health", "leaving_since": "removal_since", "closing": "terminate_sessions"}
_ROLLOUT_FROM_V1 = {"order": "spec"}
_STEP_FROM_V1 = {"begun": "drain_requested_at", "cut_off": "interrupted"}


def _upgrade_intents_from_v1(content: Any) -> Any:
    return _rename(content, _INTENTS_FROM_V1, "drains", _DRAIN_FROM_V1)


def _upgrade_plan_from_v2(content: Any) -> Any:
    """Drop the rebalancing round too: a restart cancels it anyway. Format 1 needs no other change."""
    match content:
        case {"plan": {"rebalance": {**rebalance}, **plan}, **saved}:
            finished = {"round": rebalance.get("round", 0), "round_ends_at": rebalance.get("until", 0.0)}
            upgraded = _rename({**plan, "rebalance": finished}, _PLAN_FROM_V2, "nodes", _NODE_FROM_V2)
            return {**saved, "plan": upgraded}
    return content


def _upgrade_rollout_from_v1(content: Any) -> Any:
    return _rename(content, _ROLLOUT_FROM_V1, "steps", _STEP_FROM_V1)


def _rename(content: Any, names: Mapping[str, str], children: str, child_names: Mapping[str, str]) -> Any:
    """Return `content` with its fields renamed, and those of each value of the mapping `children`.

    Content of another shape stays as it is: decoding it reports the problem.
    """
    if not isinstance(content, dict):
        return content
    renamed = {names.get(name, name): value for name, value in content.items()}
    if isinstance(inner := renamed.get(children), dict):
        renamed[children] = {
            key: {child_names.get(name, name): value for name, value in child.items()}
            if isinstance(child, dict)
            else child
            for key, child in inner.items()
        }
    return renamed


def _upgrade_rollouts_from_v1(content: Any) -> Any:
    match content:
        case {"rollouts": {**rollouts}}:
            return {
                "rollouts": {name: _upgrade_rollout_from_v1(rollout) for name, rollout in rollouts.items()}
            }
    return content


@dataclass(frozen=True, slots=True)
class RolloutsFile:
    """The content of `rollouts.json`."""

    rollouts: Mapping[str, Rollout] = field(default_factory=lambda: EMPTY_MAP)  # by id


INTENTS_CODEC = VersionedCodec("intents", 2, Intents, {1: _upgrade_intents_from_v1})
PLAN_CODEC = VersionedCodec("plan", 3, SavedPlan, {1: _upgrade_plan_from_v2, 2: _upgrade_plan_from_v2})
ROLLOUT_CODEC = VersionedCodec("rollout", 2, Rollout, {1: _upgrade_rollout_from_v1})
ROLLOUTS_CODEC = VersionedCodec("rollouts", 2, RolloutsFile, {1: _upgrade_rollouts_from_v1})

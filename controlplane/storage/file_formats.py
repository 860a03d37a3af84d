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
_REBALANCE_FROM_V2 = {
    "until": "round_ends_at",
    "moves": "outgoing",
    "wants": "incoming",
    "futile": "stalled_rounds",
    "excess": "surplus",
    "moved": "migrated_before",
    "rests_until": "paused_until",
}
_ROLLOUT_FROM_V1 = {"order": "spec"}
_STEP_FROM_V1 = {"begun": "drain_requested_at", "cut_off": "interrupted"}


def _upgrade_intents_from_v1(content: Any) -> Any:
    return _rename(content, _INTENTS_FROM_V1, "drains", _DRAIN_FROM_V1)


def _upgrade_plan_from_v1(content: Any) -> Any:
    """Drop the migrations of the rebalancing round: format 1 counted them differently."""
    match content:
        case {"plan": {"rebalance": {**rebalance}, **plan}, **saved}:
            kept = {name: value for name, value in rebalance.items() if name not in ("moves", "wants")}
            return _upgrade_plan_from_v2({**saved, "plan": {**plan, "rebalance": kept}})
    return content


def _upgrade_plan_from_v2(content: Any) -> Any:
    match content:
        case {"plan": {"rebalance": {**rebalance}, **plan}, **saved}:
            plan["rebalance"] = _rename_fields(rebalance, _REBALANCE_FROM_V2)
            upgraded = _rename(plan, _PLAN_FROM_V2, "nodes", _NODE_FROM_V2)
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
    renamed = _rename_fields(content, names)
    if isinstance(inner := renamed.get(children), dict):
        renamed[children] = {
            key: _rename_fields(child, child_names) if isinstance(child, dict) else child
            for key, child in inner.items()
        }
    return renamed


def _rename_fields(fields: Mapping[Any, Any], names: Mapping[str, str]) -> dict[Any, Any]:
    return {names.get(name, name): value for name, value in fields.items()}


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
PLAN_CODEC = VersionedCodec("plan", 3, SavedPlan, {1: _upgrade_plan_from_v1, 2: _upgrade_plan_from_v2})
ROLLOUT_CODEC = VersionedCodec("rollout", 2, Rollout, {1: _upgrade_rollout_from_v1})
ROLLOUTS_CODEC = VersionedCodec("rollouts", 2, RolloutsFile, {1: _upgrade_rollouts_from_v1})

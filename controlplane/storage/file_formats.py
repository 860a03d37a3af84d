"""The saved values and the versions of their file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import Rollout
from controlplane.storage.store import SavedPlan
from controlplane.storage.versioned_codec import VersionedCodec


@dataclass(frozen=True, slots=True)
class RolloutsFile:
    """The content of `rollouts.json`."""

    rollouts: Mapping[str, Rollout] = field(default_factory=lambda: EMPTY_MAP)  # by id


INTENTS_CODEC = VersionedCodec("intents", 1, Intents)
PLAN_CODEC = VersionedCodec("plan", 1, SavedPlan)
ROLLOUT_CODEC = VersionedCodec("rollout", 1, Rollout)
ROLLOUTS_CODEC = VersionedCodec("rollouts", 1, RolloutsFile)

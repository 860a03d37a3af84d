"""Rollouts as frozen data: what was asked for, how far each node is, and why. No I/O, no clock.

Times are Unix seconds as in `controlplane.model`; durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import EMPTY_MAP

MANUAL = "manual"
"""The action that nobody runs: an operator, or whatever manages the cluster, restarts the node."""

WAITING_PREFIX = "waits: "
"""How the reason of a rollout begins that can begin with no node for now."""


class RolloutPhase(StrEnum):
    """Where a rollout is in its life."""

    RUNNING = "running"
    PAUSED = "paused"  # begins nothing more; what waits goes on waiting
    ABORTING = "aborting"  # takes back the drains that are its own
    DONE = "done"
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        return self in (RolloutPhase.DONE, RolloutPhase.ABORTED)


class Stage(StrEnum):
    """How far one node is. The order here is the order in which a node goes through them."""

    PENDING = "pending"
    DRAINING = "draining"  # its sessions move away, until none is left or the deadline
    STARTED = "started"  # recorded before the action is run; found in a record, it is never run again
    RETURNING = "returning"  # the action is over: the node is to register with a newer start time, and pass
    WARMING = "warming"  # undrained: it gets its share of sessions step by step
    DONE = "done"
    FAILED = "failed"  # the reason says what went wrong; `resume` begins with it anew
    SKIPPED = "skipped"  # of an aborted rollout, or gone before its turn


IN_PROGRESS = (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.WARMING)
"""Stages of nodes that count against `max_unavailable`."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What an operator asked for."""

    nodes: tuple[str, ...]  # addresses, in the order in which they are to be taken
    action: str = MANUAL  # a name in `rollouts.actions`, or MANUAL
    max_unavailable: int = 1
    drain_deadline: float = 600.0
    on_deadline: OnDeadline = OnDeadline.KEEP
    return_deadline: float = 600.0  # from the end of the action until the node is back and steady
    healthy_for: float = 10.0
    version: str = ""  # that each node is to have afterwards; empty: any
    failure_budget: int = 0  # nodes that may fail before the rollout pauses
    selector: str = "all"  # as the operator wrote it


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a rollout."""

    address: str
    stage: Stage = Stage.PENDING
    reason: str = ""  # of the present stage, as a sentence
    since: float = 0.0  # when it came into this stage
    drain_requested_at: float | None = None  # when its drain was asked for
    ended: float | None = None
    drained_by_us: bool = False  # its drain was seen among the intents, and is this rollout's to take back
    started_before: float | None = None  # the node's start time before the action
    version_before: str = ""
    version_after: str = ""
    sessions: int | None = None  # that it had when its drain was asked for
    moved: int = 0
    failed: int = 0  # tries to move after which a session stayed
    closed: int = 0  # sessions that were still there when the action began
    attempts: int = 0  # how often its action was started, one for each time that an operator resumed
    interrupted: bool = False  # the latest start of its action may have been cut off, with who ran it


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout and all that is known of it; what is kept over restarts."""

    id: str
    spec: RolloutSpec
    by: str  # who asked for it
    created: float
    phase: RolloutPhase = RolloutPhase.RUNNING
    reason: str = ""  # why it is in this phase, as a sentence
    since: float = 0.0  # when it came into this phase
    steps: Mapping[str, Step] = field(default_factory=lambda: EMPTY_MAP)  # by address, in the order of turns
    ended: float | None = None
    forced: bool = False  # it was started although checks spoke against it

    @property
    def is_waiting(self) -> bool:
        """Whether it can begin with no node for now, for the reason that it has."""
        return self.reason.startswith(WAITING_PREFIX)

    def with_step(self, step: Step) -> Mapping[str, Step]:
        """The steps with one of them replaced."""
        return MappingProxyType({**self.steps, step.address: step})

"""Rollouts as frozen data: the request, the progress of each node, and the reasons. No I/O, no clock.

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
"""The action that Tidevoy does not run: an operator or a cluster management tool restarts the node."""

WAITING_PREFIX = "waits: "
"""Prefix of the reason of a rollout that cannot start with any node for now."""


class RolloutPhase(StrEnum):
    """Lifecycle phase of a rollout."""

    RUNNING = "running"
    PAUSED = "paused"  # starts no further step; steps that wait keep waiting
    ABORTING = "aborting"  # revokes its own drains
    DONE = "done"
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        return self in (RolloutPhase.DONE, RolloutPhase.ABORTED)


class Stage(StrEnum):
    """Progress of one node. A node goes through the stages in this order."""

    PENDING = "pending"
    DRAINING = "draining"  # its sessions migrate away, until none is left or the deadline passes
    STARTED = "started"  # saved before the action runs: after a restart the action is never run again
    RETURNING = "returning"  # the action ended: the node must register with a newer start time and pass
    WARMING = "warming"  # undrained: slow start raises its share of the sessions
    DONE = "done"
    FAILED = "failed"  # the reason says what went wrong; `resume` retries it
    SKIPPED = "skipped"  # the rollout was aborted, or the node was gone before its step


IN_PROGRESS = (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.WARMING)
"""Stages of nodes that count against `max_unavailable`."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What an operator requested."""

    nodes: tuple[str, ...]  # addresses, in processing order
    action: str = MANUAL  # a name in `rollouts.actions`, or MANUAL
    max_unavailable: int = 1
    drain_deadline: float = 600.0
    on_deadline: OnDeadline = OnDeadline.KEEP
    return_deadline: float = 600.0  # from the end of the action until the node is back and stable
    healthy_for: float = 10.0
    version: str = ""  # version that each node must have afterwards; empty: any
    failure_budget: int = 0  # nodes that may fail before the rollout pauses
    selector: str = "all"  # as the operator wrote it


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a rollout on one node."""

    address: str
    stage: Stage = Stage.PENDING
    reason: str = ""  # reason for the current stage, as a sentence
    since: float = 0.0  # when it entered this stage
    drain_requested_at: float | None = None  # when its drain was requested
    ended: float | None = None
    drained_by_us: bool = False  # its drain is among the intents and is owned by this rollout
    started_before: float | None = None  # the node's start time before the action
    version_before: str = ""
    version_after: str = ""
    sessions: int | None = None  # sessions on it when its drain was requested
    moved: int = 0
    failed: int = 0  # failed migrations after which the session stayed
    closed: int = 0  # sessions that remained when the action began
    attempts: int = 0  # how often its action was started; each `resume` may add one
    interrupted: bool = False  # the control plane may have stopped while it ran the action


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout with its progress; it is saved across restarts."""

    id: str
    spec: RolloutSpec
    by: str  # who requested it
    created: float
    phase: RolloutPhase = RolloutPhase.RUNNING
    reason: str = ""  # why it is in this phase, as a sentence
    since: float = 0.0  # when it entered this phase
    steps: Mapping[str, Step] = field(default_factory=lambda: EMPTY_MAP)  # by address, in processing order
    ended: float | None = None
    forced: bool = False  # it was started although preflight checks failed

    @property
    def is_waiting(self) -> bool:
        """Return whether its reason says that it cannot start with any node for now."""
        return self.reason.startswith(WAITING_PREFIX)

    def with_step(self, step: Step) -> Mapping[str, Step]:
        """Return the steps with the step of one node replaced."""
        return MappingProxyType({**self.steps, step.address: step})

"""Rollouts (frozen data): drain each node, run an action such as a restart, wait for the node's return.

Times are Unix seconds, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from controlplane.model.comparison import DEFAULT_MAX_RATIO, VerificationReport
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import EMPTY_MAP

MANUAL = "manual"
"""The action for which Tidevoy runs nothing: an operator or a cluster management tool restarts the node."""

REPLAY_PREFIX = "replay:"
"""`RolloutSpec.verify` has this prefix before the name of a capture."""

WAITING_PREFIX = "waits: "
"""`Rollout.reason` has this prefix while the rollout cannot start with any node."""


class RolloutPhase(StrEnum):
    """Lifecycle phase of a rollout."""

    RUNNING = "running"
    PAUSED = "paused"  # starts no further step; steps that are waiting continue to wait
    ABORTING = "aborting"  # withdraws the drains that it requested
    DONE = "done"
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        return self in (RolloutPhase.DONE, RolloutPhase.ABORTED)


class Stage(StrEnum):
    """Progress of one node. A node goes through the stages in this order."""

    PENDING = "pending"
    DRAINING = "draining"  # its sessions migrate away, until none is left or the deadline passes
    STARTED = "started"  # saved before the action runs, so a restarted control plane never repeats it
    RETURNING = "returning"  # the action ended; the node must register with a newer start time and be healthy
    VERIFYING = "verifying"  # captured reads run on the node and on an old one; the node is still drained
    WARMING = "warming"  # its drain has ended; slow start raises its share of the sessions
    DONE = "done"
    FAILED = "failed"  # the reason says what went wrong; `resume` retries it
    SKIPPED = "skipped"  # the rollout was aborted, or the node disappeared before its step

    @property
    def is_final(self) -> bool:
        return self in (Stage.DONE, Stage.FAILED, Stage.SKIPPED)


IN_PROGRESS = (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.VERIFYING, Stage.WARMING)
"""Stages of nodes that count against `max_unavailable`."""


class Verification(StrEnum):
    """Whether a node has been compared with an old one after its action."""

    NONE = "none"  # not yet, or the rollout does not verify nodes
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # an operator resumed the rollout without verification of this node


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """The request of an operator."""

    nodes: tuple[str, ...]  # addresses, in processing order
    action: str = MANUAL  # a name in `rollouts.actions`, or MANUAL
    max_unavailable: int = 1
    drain_deadline: float = 600.0
    on_deadline: OnDeadline = OnDeadline.KEEP
    return_deadline: float = 600.0  # from the end of the action until the node is back and healthy
    healthy_for: float = 10.0
    version: str = ""  # required version of each node afterwards; empty: any
    failure_budget: int = 0  # nodes that may fail before the rollout pauses
    selector: str = "all"  # which nodes, as the operator wrote it
    verify: str = ""  # `replay:` and the name of a capture; empty: nodes are not verified
    verify_ratio: float = DEFAULT_MAX_RATIO  # a digest that takes this many times as long is slower

    @property
    def capture(self) -> str:
        """The name of the capture that verifies nodes; empty if there is none."""
        return self.verify.removeprefix(REPLAY_PREFIX)


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a rollout on one node."""

    address: str
    stage: Stage = Stage.PENDING
    reason: str = ""  # reason for the current stage, as a sentence
    since: float = 0.0  # when it entered this stage
    drain_requested_at: float | None = None  # when its drain was requested
    ended_at: float | None = None  # when it reached a final stage
    owns_drain: bool = False  # the node has a drain that this rollout requested
    started_before: float | None = None  # the node's start time before the action
    version_before: str = ""
    version_after: str = ""
    sessions: int | None = None  # sessions on it when its drain was requested
    migrated_sessions: int = 0
    failed_migrations: int = 0  # migration attempts after which the session stayed on the node
    terminated_sessions: int = 0  # sessions that remained when the action began
    attempts: int = 0  # how often its action was started; each `resume` may add one
    interrupted: bool = False  # the control plane may have stopped during the action
    verification: Verification = Verification.NONE

    def enter(self, stage: Stage, reason: str, now: float) -> Step:
        """Return the step in another stage."""
        ended_at = now if stage.is_final else None
        return replace(self, stage=stage, reason=reason, since=now, ended_at=ended_at)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout with its progress. It is saved, so it survives a restart of the control plane."""

    id: str
    spec: RolloutSpec
    created_by: str
    created_at: float
    phase: RolloutPhase = RolloutPhase.RUNNING
    reason: str = ""  # why it is in this phase, as a sentence
    since: float = 0.0  # when it entered this phase
    steps: Mapping[str, Step] = field(default_factory=lambda: EMPTY_MAP)  # by address, in processing order
    ended_at: float | None = None
    forced: bool = False  # it was started although preflight checks failed
    reports: Mapping[str, VerificationReport] = field(default_factory=lambda: EMPTY_MAP)  # by address, latest

    @property
    def is_waiting(self) -> bool:
        """Return whether the rollout cannot start with any node for now."""
        return self.reason.startswith(WAITING_PREFIX)

    def enter(self, phase: RolloutPhase, reason: str, now: float) -> Rollout:
        """Return the rollout in another phase."""
        ended_at = now if phase.is_over else None
        return replace(self, phase=phase, reason=reason, since=now, ended_at=ended_at)

    def with_steps(self, *steps: Step) -> Rollout:
        """Return the rollout with these steps for their nodes; the same object if nothing changes."""
        changed = {step.address: step for step in steps if self.steps[step.address] is not step}
        return replace(self, steps=MappingProxyType({**self.steps, **changed})) if changed else self

"""A rollout's life: from what is seen of the nodes to its next state, and what is to be done for it. Pure.

What is to be done is told by the record and by what is seen, never by what happened before: a control plane
that takes over, or that was stopped between writing and doing, does what is left. The one exception is an
action, which may run once only: it is told in the moment in which its step becomes `started`, and whoever
finds a step `started` without running its action itself asks for `cut_off`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from controlplane.errors import RolloutRefused
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import (
    IN_PROGRESS,
    WAITING_PREFIX,
    Rollout,
    RolloutPhase,
    RolloutSpec,
    Stage,
    Step,
)
from controlplane.rollouts import node_step
from controlplane.rollouts.observation import RolloutView


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Drain this node, unless it is drained."""

    address: str


@dataclass(frozen=True, slots=True)
class UndrainNode:
    """Take back the drain of this node if it is the rollout's."""

    address: str


@dataclass(frozen=True, slots=True)
class RunAction:
    """Run the action for this node; told once for each attempt."""

    address: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ProbeLogin:
    """Open a session on this node and run a statement, unless that is under way."""

    address: str


Effect = DrainNode | UndrainNode | RunAction | ProbeLogin


def create(
    rollout_id: str,
    spec: RolloutSpec,
    by: str,
    now: float,
    *,
    start_times: Mapping[str, float | None] = EMPTY_MAP,
    forced: bool = False,
) -> Rollout:
    """A new rollout; `started` are the start times of its nodes."""
    steps = {a: Step(a, since=now, started_before=start_times.get(a)) for a in spec.nodes}
    return Rollout(rollout_id, spec, by, now, since=now, steps=MappingProxyType(steps), forced=forced)


def advance(rollout: Rollout, view: RolloutView, now: float) -> tuple[Rollout, tuple[Effect, ...]]:
    """The next state, to be durable before the effects are done; the same object when nothing changes."""
    if rollout.phase.is_over:
        return rollout, ()
    following = rollout
    if rollout.phase is RolloutPhase.ABORTING:
        following = _advance_abort(rollout, view, now)
    else:
        for address, step in rollout.steps.items():
            following = _with_step(
                following, node_step.advance(step, view.nodes.get(address), rollout, view, now)
            )
        if following.phase is RolloutPhase.RUNNING:
            following = _check_completion(following, view, now)
        if following.phase is RolloutPhase.RUNNING:
            following = _start_next(following, view, now)
    return following, tuple(_effects(rollout, following, view, now))


def pause(rollout: Rollout, by: str, now: float) -> Rollout:
    """Begin nothing more. RolloutRefused."""
    if rollout.phase is RolloutPhase.PAUSED:
        return rollout
    if rollout.phase is not RolloutPhase.RUNNING:
        raise _build_refusal(rollout, "paused")
    return replace(rollout, phase=RolloutPhase.PAUSED, reason=f"paused by {by}", since=now)


def resume(rollout: Rollout, by: str, now: float) -> Rollout:
    """Go on; nodes that failed are tried again, each when its turn comes. RolloutRefused."""
    if rollout.phase is RolloutPhase.RUNNING:
        return rollout
    if rollout.phase is not RolloutPhase.PAUSED:
        raise _build_refusal(rollout, "resumed")
    steps = {
        a: replace(
            s, stage=Stage.PENDING, reason=f"to be tried again, for {by} resumed", since=now, ended=None
        )
        if s.stage is Stage.FAILED
        else s
        for a, s in rollout.steps.items()
    }
    return replace(
        rollout,
        phase=RolloutPhase.RUNNING,
        reason=f"resumed by {by}",
        since=now,
        steps=MappingProxyType(steps),
    )


def abort(rollout: Rollout, by: str, now: float) -> Rollout:
    """Give back what was drained, and end. RolloutRefused."""
    if rollout.phase in (RolloutPhase.ABORTING, RolloutPhase.ABORTED):
        return rollout
    if rollout.phase.is_over:
        raise _build_refusal(rollout, "aborted")
    return replace(rollout, phase=RolloutPhase.ABORTING, reason=f"aborted by {by}", since=now)


def action_finished(rollout: Rollout, address: str, attempt: int, problem: str, now: float) -> Rollout:
    """An action has ended; `problem` says how it failed, and is empty when it did not."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED or step.attempts != attempt:
        return rollout
    return _with_step(rollout, node_step.action_finished(step, rollout.spec.action, problem, now))


def action_interrupted(rollout: Rollout, address: str, now: float) -> Rollout:
    """A step is found started, and nobody runs its action: it never runs again, but is judged by the node."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED:
        return rollout
    return _with_step(rollout, node_step.action_interrupted(step, rollout.spec.action, now))


def clamp_timestamps(rollout: Rollout, now: float) -> Rollout:
    """A rollout that was kept, with no time after `now`: the clock of before may have been ahead."""
    steps = {
        a: replace(
            s,
            since=min(s.since, now),
            drain_requested_at=_clamp(s.drain_requested_at, now),
            ended=_clamp(s.ended, now),
        )
        for a, s in rollout.steps.items()
    }
    since, created = min(rollout.since, now), min(rollout.created, now)
    return replace(
        rollout,
        since=since,
        created=created,
        ended=_clamp(rollout.ended, now),
        steps=MappingProxyType(steps),
    )


def _clamp(at: float | None, now: float) -> float | None:
    return at if at is None else min(at, now)


def _with_step(rollout: Rollout, step: Step) -> Rollout:
    if rollout.steps[step.address] is step:
        return rollout
    return replace(rollout, steps=rollout.with_step(step))


def _build_refusal(rollout: Rollout, what: str) -> RolloutRefused:
    return RolloutRefused(f"the rollout {rollout.id} cannot be {what}", [f"it is {rollout.phase}"])


def _check_completion(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Paused when too much has failed, done when all is done."""
    failures = [step for step in rollout.steps.values() if step.stage is Stage.FAILED]
    finished = not any(
        step.stage is Stage.PENDING or step.stage in IN_PROGRESS for step in rollout.steps.values()
    )
    if failures and (
        finished or len(failures) > rollout.spec.failure_budget or any(step.interrupted for step in failures)
    ):
        return replace(
            rollout, phase=RolloutPhase.PAUSED, reason=_failure_reason(rollout, failures), since=now
        )
    if finished and not view.drained_by_us:
        return replace(
            rollout, phase=RolloutPhase.DONE, reason=_outcome_summary(rollout), since=now, ended=now
        )
    return rollout


def _failure_reason(rollout: Rollout, failures: list[Step]) -> str:
    """Why a rollout pauses for nodes that failed, and how to go on."""
    last = max(failures, key=lambda step: step.since)
    more = f" ({len(failures)} nodes failed)" if len(failures) > 1 else ""
    kept = "; it stays drained" if last.drained_by_us else ""
    return (
        f"{last.address} failed: {last.reason}{kept}{more}. Once it is mended, `tidevoy rollout resume"
        f" {rollout.id}` goes on with it; `tidevoy rollout abort {rollout.id}` undrains it and ends"
    )


def _start_next(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """With the nodes whose turn it is, as long as not too many are out of service at once."""
    spec, steps = rollout.spec, dict(rollout.steps)
    in_progress = {address for address, step in steps.items() if step.stage in IN_PROGRESS}
    # Nodes of ours that failed are out, too; how many of those may be is what the failure budget is for.
    exempt = {a for a, s in steps.items() if s.stage is Stage.FAILED or s.drained_by_us}
    unavailable = view.unavailable.keys() - in_progress - exempt
    active_per_group = Counter(group for address, group in view.active.items() if address not in in_progress)
    wait_reason = ""
    pending = [step for step in steps.values() if step.stage is Stage.PENDING]
    for step in sorted(pending, key=lambda step: not step.drained_by_us):  # those that are out already first
        address, node = step.address, view.nodes.get(step.address)
        if len(in_progress) >= spec.max_unavailable:
            break
        group = view.active.get(address)
        problem = ""
        if address in view.in_other_rollouts:
            problem = f"the rollout {view.in_other_rollouts[address]} has {address} in hand"
        elif len(in_progress) + len(unavailable - {address}) >= spec.max_unavailable:
            problem = f"a node is out of service already: {view.unavailable[min(unavailable - {address})]}"
        elif group is not None and active_per_group[group] < 2 and not rollout.forced:
            problem = f"{address} is the only node{f' of the group {group}' if group else ''} in service"
        if problem or node is None:
            wait_reason = wait_reason or problem
            continue
        steps[address] = node_step.start(step, node, rollout, now)
        if steps[address].stage in IN_PROGRESS:
            in_progress.add(address)
            if group is not None:
                active_per_group[group] -= 1
    reason = f"{WAITING_PREFIX}{wait_reason}" if wait_reason and not in_progress else ""
    # What an operator did last is worth knowing until there is something to say.
    reason = reason or ("" if rollout.is_waiting else rollout.reason)
    if steps == rollout.steps and reason == rollout.reason:
        return rollout
    return replace(rollout, steps=MappingProxyType(steps), reason=reason)


def _advance_abort(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """An aborted rollout on its way to its end: actions that run end first, and drains are taken back."""
    following = rollout
    for step in rollout.steps.values():
        match step.stage:
            case Stage.PENDING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted before its turn"
            case Stage.DRAINING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted while it was being drained"
            case Stage.RETURNING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted before it was seen to be back"
            case Stage.WARMING:
                stage, reason = Stage.DONE, "it is back; the rollout was aborted while it warmed up"
            case _:
                continue
        following = _with_step(
            following, replace(step, stage=stage, reason=reason, since=now, ended=now, drained_by_us=False)
        )
    is_acting = any(step.stage is Stage.STARTED for step in following.steps.values())
    if is_acting or view.drained_by_us:
        return following
    # Nothing is drained by us any more, whatever failed.
    steps = {a: replace(s, drained_by_us=False) if s.drained_by_us else s for a, s in following.steps.items()}
    return replace(
        following,
        phase=RolloutPhase.ABORTED,
        reason=f"{rollout.reason}; {_outcome_summary(following)}",
        since=now,
        ended=now,
        steps=MappingProxyType(steps),
    )


def _outcome_summary(rollout: Rollout) -> str:
    """How many nodes ended how."""
    counts = Counter(step.stage for step in rollout.steps.values())
    parts = [f"{counts[Stage.DONE]} of {len(rollout.steps)} nodes done"]
    parts += [f"{counts[stage]} {stage}" for stage in (Stage.FAILED, Stage.SKIPPED) if counts[stage]]
    return ", ".join(parts)


def _effects(before: Rollout, after: Rollout, view: RolloutView, now: float) -> Iterator[Effect]:
    for address in sorted(view.drained_by_us):
        if not _keeps_drain(after, after.steps.get(address)):
            yield UndrainNode(address)
    for address, step in after.steps.items():
        node = view.nodes.get(address)
        if step.stage is Stage.STARTED and before.steps[address].stage is not Stage.STARTED:
            yield RunAction(address, step.attempts)
        if node is None or after.phase is RolloutPhase.ABORTING:
            continue
        if step.stage is Stage.DRAINING and node.drain is None:
            yield DrainNode(address)
        if node_step.needs_login_probe(step, node, after.spec, view, now):
            yield ProbeLogin(address)


def _keeps_drain(rollout: Rollout, step: Step | None) -> bool:
    """Whether a node that is drained by the rollout is to stay so."""
    if step is None or rollout.phase.is_over:
        return False
    if rollout.phase is RolloutPhase.ABORTING:
        return step.stage is Stage.STARTED
    return step.stage in (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.FAILED) or (
        step.stage is Stage.PENDING and step.drained_by_us
    )


def with_drain_progress(rollout: Rollout, session_counts: Mapping[str, tuple[int, int]]) -> Rollout:
    """With what has come so far of the sessions of nodes that are drained: by address, moved and failed."""
    steps = {
        a: replace(s, moved=max(s.moved, session_counts[a][0]), failed=max(s.failed, session_counts[a][1]))
        if a in session_counts and s.stage is Stage.DRAINING
        else s
        for a, s in rollout.steps.items()
    }
    return replace(rollout, steps=MappingProxyType(steps))

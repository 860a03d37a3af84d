"""The state machine of a rollout: computes the next state and the effects from the observed nodes. No I/O.

Effects follow from the record and the view alone, never from history: a control plane that takes over, or
that stopped between recording and acting, does what remains. The one exception is an action, which must run
only once: it is an effect of the transition to `started`, and a control plane that finds a started step whose
action it does not run calls `action_interrupted`.
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
    """Drain this node unless it is drained."""

    address: str


@dataclass(frozen=True, slots=True)
class UndrainNode:
    """Release the drain of this node if the rollout owns it."""

    address: str


@dataclass(frozen=True, slots=True)
class RunAction:
    """Run the action for this node; returned once per attempt."""

    address: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ProbeLogin:
    """Open a session on this node and run a statement, unless a probe is running."""

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
    """Return a new rollout; `start_times` are those of its nodes."""
    steps = {a: Step(a, since=now, started_before=start_times.get(a)) for a in spec.nodes}
    return Rollout(rollout_id, spec, by, now, since=now, steps=MappingProxyType(steps), forced=forced)


def advance(rollout: Rollout, view: RolloutView, now: float) -> tuple[Rollout, tuple[Effect, ...]]:
    """Return the next state (the same object if unchanged) and the effects.

    Store the state before executing the effects.
    """
    if rollout.phase.is_over:
        return rollout, ()
    updated = rollout
    if rollout.phase is RolloutPhase.ABORTING:
        updated = _advance_abort(rollout, view, now)
    else:
        for address, step in rollout.steps.items():
            updated = _with_step(
                updated, node_step.advance(step, view.nodes.get(address), rollout, view, now)
            )
        if updated.phase is RolloutPhase.RUNNING:
            updated = _check_completion(updated, view, now)
        if updated.phase is RolloutPhase.RUNNING:
            updated = _start_next(updated, view, now)
    return updated, tuple(_effects(rollout, updated, view, now))


def pause(rollout: Rollout, by: str, now: float) -> Rollout:
    """Start no more steps. Raises RolloutRefused."""
    if rollout.phase is RolloutPhase.PAUSED:
        return rollout
    if rollout.phase is not RolloutPhase.RUNNING:
        raise _build_refusal(rollout, "paused")
    return replace(rollout, phase=RolloutPhase.PAUSED, reason=f"paused by {by}", since=now)


def resume(rollout: Rollout, by: str, now: float) -> Rollout:
    """Continue; failed nodes become pending again. Raises RolloutRefused."""
    if rollout.phase is RolloutPhase.RUNNING:
        return rollout
    if rollout.phase is not RolloutPhase.PAUSED:
        raise _build_refusal(rollout, "resumed")
    steps = {
        a: replace(
            s,
            stage=Stage.PENDING,
            reason=f"to be retried, because {by} resumed the rollout",
            since=now,
            ended=None,
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
    """Release the drains and end. Raises RolloutRefused."""
    if rollout.phase in (RolloutPhase.ABORTING, RolloutPhase.ABORTED):
        return rollout
    if rollout.phase.is_over:
        raise _build_refusal(rollout, "aborted")
    return replace(rollout, phase=RolloutPhase.ABORTING, reason=f"aborted by {by}", since=now)


def action_finished(rollout: Rollout, address: str, attempt: int, problem: str, now: float) -> Rollout:
    """Record the end of an action; `problem` is empty if it succeeded."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED or step.attempts != attempt:
        return rollout
    return _with_step(rollout, node_step.action_finished(step, rollout.spec.action, problem, now))


def action_interrupted(rollout: Rollout, address: str, now: float) -> Rollout:
    """Record that nothing runs a started step's action. It is not run again; the node shows the result."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED:
        return rollout
    return _with_step(rollout, node_step.action_interrupted(step, rollout.spec.action, now))


def clamp_timestamps(rollout: Rollout, now: float) -> Rollout:
    """Return a stored rollout without times after `now`: the clock that set them may have been ahead."""
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


def _build_refusal(rollout: Rollout, operation: str) -> RolloutRefused:
    return RolloutRefused(f"the rollout {rollout.id} cannot be {operation}", [f"it is {rollout.phase}"])


def _check_completion(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Pause the rollout if too many nodes failed; end it if all nodes are done."""
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
    """Say why a rollout pauses for failed nodes, and how to continue."""
    last = max(failures, key=lambda step: step.since)
    more = f" ({len(failures)} nodes failed)" if len(failures) > 1 else ""
    drain_note = "; it stays drained" if last.drained_by_us else ""
    return (
        f"{last.address} failed: {last.reason}{drain_note}{more}. Once it is fixed, `tidevoy rollout resume"
        f" {rollout.id}` retries it; `tidevoy rollout abort {rollout.id}` undrains it and ends the rollout"
    )


def _start_next(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Start the next nodes, up to the limit of nodes out of service at once."""
    spec, steps = rollout.spec, dict(rollout.steps)
    in_progress = {address for address, step in steps.items() if step.stage in IN_PROGRESS}
    # Failed nodes of this rollout are out of service too, but the failure budget limits those.
    exempt = {a for a, s in steps.items() if s.stage is Stage.FAILED or s.drained_by_us}
    unavailable = view.unavailable.keys() - in_progress - exempt
    active_per_group = Counter(group for address, group in view.active.items() if address not in in_progress)
    wait_reason = ""
    pending = [step for step in steps.values() if step.stage is Stage.PENDING]
    for step in sorted(pending, key=lambda step: not step.drained_by_us):  # drained nodes first
        address, node = step.address, view.nodes.get(step.address)
        if len(in_progress) >= spec.max_unavailable:
            break
        group = view.active.get(address)
        problem = ""
        if address in view.in_other_rollouts:
            problem = f"the rollout {view.in_other_rollouts[address]} is working on {address}"
        elif len(in_progress) + len(unavailable - {address}) >= spec.max_unavailable:
            problem = f"a node is already out of service: {view.unavailable[min(unavailable - {address})]}"
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
    # Keep the operator's last action as the reason until there is a newer reason.
    reason = reason or ("" if rollout.is_waiting else rollout.reason)
    if steps == rollout.steps and reason == rollout.reason:
        return rollout
    return replace(rollout, steps=MappingProxyType(steps), reason=reason)


def _advance_abort(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Advance an aborting rollout: running actions end first, then its drains are released."""
    updated = rollout
    for step in rollout.steps.values():
        match step.stage:
            case Stage.PENDING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted before its turn"
            case Stage.DRAINING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted while the node was draining"
            case Stage.RETURNING:
                stage, reason = Stage.SKIPPED, "the rollout was aborted before the node was back"
            case Stage.WARMING:
                stage, reason = Stage.DONE, "it is back; the rollout was aborted while it warmed up"
            case _:
                continue
        updated = _with_step(
            updated, replace(step, stage=stage, reason=reason, since=now, ended=now, drained_by_us=False)
        )
    is_acting = any(step.stage is Stage.STARTED for step in updated.steps.values())
    if is_acting or view.drained_by_us:
        return updated
    # The rollout owns no drains any more, not even of failed nodes.
    steps = {a: replace(s, drained_by_us=False) if s.drained_by_us else s for a, s in updated.steps.items()}
    return replace(
        updated,
        phase=RolloutPhase.ABORTED,
        reason=f"{rollout.reason}; {_outcome_summary(updated)}",
        since=now,
        ended=now,
        steps=MappingProxyType(steps),
    )


def _outcome_summary(rollout: Rollout) -> str:
    """Return the number of nodes by result, as text."""
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
    """Return whether a node that the rollout drained stays drained."""
    if step is None or rollout.phase.is_over:
        return False
    if rollout.phase is RolloutPhase.ABORTING:
        return step.stage is Stage.STARTED
    return step.stage in (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.FAILED) or (
        step.stage is Stage.PENDING and step.drained_by_us
    )


def with_drain_progress(rollout: Rollout, session_counts: Mapping[str, tuple[int, int]]) -> Rollout:
    """Add session counts to draining nodes: address -> (migrated, failed)."""
    steps = {
        a: replace(s, moved=max(s.moved, session_counts[a][0]), failed=max(s.failed, session_counts[a][1]))
        if a in session_counts and s.stage is Stage.DRAINING
        else s
        for a, s in rollout.steps.items()
    }
    return replace(rollout, steps=MappingProxyType(steps))

"""The state machine of a rollout: computes the next state and the effects from the observed nodes. No I/O.

Effects depend only on the record and the view, not on history. So a control plane that takes over, or that
restarts between recording and acting, does the remaining work. The exception is an action, which must run
only once: only the transition to `started` causes it. A control plane that finds a started step without a
running action records the end of the action with `action_ended`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from controlplane.errors import RolloutRejected
from controlplane.model.comparison import VerificationReport
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import (
    IN_PROGRESS,
    WAITING_PREFIX,
    Rollout,
    RolloutPhase,
    RolloutSpec,
    Stage,
    Step,
    Verification,
)
from controlplane.rollouts import node_step
from controlplane.rollouts.observation import RolloutView, VerificationResult
from controlplane.verification.verdict import summarize

T = TypeVar("T", Rollout, Step)

# The record of a rollout is written as a whole at each change, so only the latest reports are kept.
_MAX_REPORTS = 10

_STAGES_AFTER_ABORT = {
    Stage.PENDING: (Stage.SKIPPED, "the rollout was aborted before its turn"),
    Stage.DRAINING: (Stage.SKIPPED, "the rollout was aborted while the node was draining"),
    Stage.RETURNING: (Stage.SKIPPED, "the rollout was aborted before the node was back"),
    Stage.VERIFYING: (Stage.SKIPPED, "the rollout was aborted before the node was verified"),
    Stage.WARMING: (Stage.DONE, "it is back; the rollout was aborted while it warmed up"),
}


@dataclass(frozen=True, slots=True)
class Effects:
    """The nodes to act on after the state is stored, by address."""

    drain: tuple[str, ...] = ()  # nodes that are not drained yet
    undrain: tuple[str, ...] = ()  # nodes whose drains the rollout owns
    run_action: tuple[str, ...] = ()  # a node appears once per attempt
    probe_login: tuple[str, ...] = ()  # the caller runs one probe per node at a time
    verify: tuple[str, ...] = ()  # the caller runs one verification per node at a time


def create(
    rollout_id: str,
    spec: RolloutSpec,
    by: str,
    now: float,
    *,
    start_times: Mapping[str, float | None] = EMPTY_MAP,
    forced: bool = False,
) -> Rollout:
    """Return a new rollout; `start_times` are the start times of its nodes."""
    steps = {a: Step(a, since=now, started_before=start_times.get(a)) for a in spec.nodes}
    return Rollout(rollout_id, spec, by, now, since=now, steps=MappingProxyType(steps), forced=forced)


def advance(rollout: Rollout, view: RolloutView, now: float) -> tuple[Rollout, Effects]:
    """Return the next state (the same object if unchanged) and the effects.

    Store the state before executing the effects.
    """
    if rollout.phase.is_over:
        return rollout, Effects()
    if rollout.phase is RolloutPhase.ABORTING:
        updated = _advance_abort(rollout, view, now)
    else:
        steps = [node_step.advance(step, rollout, view, now) for step in rollout.steps.values()]
        updated = rollout.with_steps(*steps)
        if updated.phase is RolloutPhase.RUNNING:
            updated = _check_completion(updated, view, now)
        if updated.phase is RolloutPhase.RUNNING:
            updated = _start_next(updated, view, now)
    return updated, _effects(rollout, updated, view, now)


def pause(rollout: Rollout, by: str, now: float) -> Rollout:
    """Start no more steps. Raises RolloutRejected."""
    if rollout.phase is RolloutPhase.PAUSED:
        return rollout
    _require_phase(rollout, "paused", RolloutPhase.RUNNING)
    return rollout.enter(RolloutPhase.PAUSED, f"paused by {by}", now)


def resume(rollout: Rollout, by: str, now: float, *, skip_verification: bool = False) -> Rollout:
    """Continue; failed nodes become pending again. Raises RolloutRejected.

    With `skip_verification`, nodes whose verification failed return to service without another one.
    """
    if rollout.phase is RolloutPhase.RUNNING:
        return rollout
    _require_phase(rollout, "resumed", RolloutPhase.PAUSED)
    failed = [step for step in rollout.steps.values() if step.stage is Stage.FAILED]
    reason = f"to be retried, because {by} resumed the rollout"
    steps = []
    for step in failed:
        is_skipped = skip_verification and step.verification is Verification.FAILED
        verification = Verification.SKIPPED if is_skipped else Verification.NONE
        steps.append(replace(step, verification=verification).enter(Stage.PENDING, reason, now))
    resumed = rollout.with_steps(*steps)
    return resumed.enter(RolloutPhase.RUNNING, f"resumed by {by}", now)


def abort(rollout: Rollout, by: str, now: float) -> Rollout:
    """Release the drains and end. Raises RolloutRejected."""
    if rollout.phase in (RolloutPhase.ABORTING, RolloutPhase.ABORTED):
        return rollout
    _require_phase(rollout, "aborted", RolloutPhase.RUNNING, RolloutPhase.PAUSED)
    return rollout.enter(RolloutPhase.ABORTING, f"aborted by {by}", now)


def action_ended(rollout: Rollout, address: str, attempt: int, problem: str | None, now: float) -> Rollout:
    """Record the end of an action; `problem` is empty if it succeeded.

    `problem` is None if the action no longer runs and its result is unknown. Such an action is not run again,
    because the node's start time and version show its result.
    """
    step, action = rollout.steps[address], f"the action `{rollout.spec.action}`"
    if step.stage is not Stage.STARTED or step.attempts != attempt:
        return rollout
    if problem:
        return rollout.with_steps(step.enter(Stage.FAILED, f"{action} {problem}", now))
    reason = f"{action} has finished; waiting for the node to come back"
    if problem is None:
        reason = (
            f"{action} may have been interrupted, because the control plane that ran it stopped or lost"
            " leadership; it is not run again, and the node's start time and version show its result"
        )
    return rollout.with_steps(replace(step, interrupted=problem is None).enter(Stage.RETURNING, reason, now))


def verification_ended(
    rollout: Rollout, address: str, since: float, result: VerificationResult, now: float
) -> Rollout:
    """Record the end of the verification that began at `since`.

    A node that has passed returns to service once it meets all conditions of its return.
    """
    step, report = rollout.steps[address], result.report
    if step.stage is not Stage.VERIFYING or step.since != since:
        return rollout
    if report is not None:
        rollout = _with_report(rollout, report)
    reason = f"it could not be verified: {result.problem}" if result.problem else ""
    if report is not None and not report.has_passed:
        reason = f"it is worse than {report.baseline}: {summarize(report.findings)}"
    if reason:
        failed = replace(step, verification=Verification.FAILED)
        return rollout.with_steps(failed.enter(Stage.FAILED, reason, now))
    reason = "it was verified; waiting until it passes its checks"
    passed = replace(step, verification=Verification.PASSED)
    return rollout.with_steps(passed.enter(Stage.RETURNING, reason, now))


def _with_report(rollout: Rollout, report: VerificationReport) -> Rollout:
    others = [other for address, other in rollout.reports.items() if address != report.node]
    latest = sorted([*others, report], key=lambda each: each.at)[-_MAX_REPORTS:]
    return replace(rollout, reports=MappingProxyType({each.node: each for each in latest}))


def clamp_timestamps(rollout: Rollout, now: float) -> Rollout:
    """Return a stored rollout without times after `now`: the clock that set them may have been ahead."""
    steps = [
        _clamp(step, ("since", "drain_requested_at", "ended_at"), now) for step in rollout.steps.values()
    ]
    return _clamp(rollout.with_steps(*steps), ("since", "created_at", "ended_at"), now)


def _clamp(record: T, names: tuple[str, ...], now: float) -> T:
    late: dict[str, Any] = {name: now for name in names if (getattr(record, name) or 0.0) > now}
    return replace(record, **late) if late else record


def _require_phase(rollout: Rollout, operation: str, *phases: RolloutPhase) -> None:
    if rollout.phase not in phases:
        raise RolloutRejected(f"the rollout {rollout.id} cannot be {operation}", [f"it is {rollout.phase}"])


def _check_completion(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Pause the rollout if too many nodes failed; end it if all nodes are done."""
    failures = [step for step in rollout.steps.values() if step.stage is Stage.FAILED]
    finished = all(step.stage.is_final for step in rollout.steps.values())
    if failures and (
        finished
        or len(failures) > rollout.spec.failure_budget
        # If a node has become worse by its action, the others probably would, too.
        or any(step.interrupted or step.verification is Verification.FAILED for step in failures)
    ):
        return rollout.enter(RolloutPhase.PAUSED, _failure_reason(rollout, failures), now)
    if finished and not view.owned_drains:
        return rollout.enter(RolloutPhase.DONE, _outcome_summary(rollout), now)
    return rollout


def _failure_reason(rollout: Rollout, failures: list[Step]) -> str:
    """Say why a rollout pauses for failed nodes, and how to continue."""
    last = max(failures, key=lambda step: step.since)
    more = f" ({len(failures)} nodes failed)" if len(failures) > 1 else ""
    drain_note = "; it stays drained" if last.owns_drain else ""
    remedies = (
        f"Once it is fixed, `tidevoy rollout resume {rollout.id}` retries it; `tidevoy rollout abort"
        f" {rollout.id}` undrains it and ends the rollout"
    )
    if last.verification is Verification.FAILED:
        remedies = (
            f"`tidevoy rollout resume {rollout.id}` verifies it again, with `--skip-verification` it returns"
            f" to service as it is; `tidevoy rollout abort {rollout.id}` undrains it and ends the rollout"
        )
        if last.address in rollout.reports:
            show = f"`tidevoy rollout verification {rollout.id} {last.address}` shows the comparison"
            remedies = f"{show}; {remedies}"
    return f"{last.address} failed: {last.reason}{drain_note}{more}. {remedies}"


def _start_next(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Start the next nodes, up to the limit of nodes out of service at once."""
    spec, steps, started = rollout.spec, rollout.steps, list[Step]()
    in_progress = {address for address, step in steps.items() if step.stage in IN_PROGRESS}
    # Failed nodes of this rollout are out of service too, but the failure budget limits those.
    exempt = {a for a, s in steps.items() if s.stage is Stage.FAILED or s.owns_drain}
    unavailable = view.unavailable.keys() - in_progress - exempt
    active_per_group = Counter(group for address, group in view.active.items() if address not in in_progress)
    wait_reason = ""
    # A node whose turn is still to come may be the old one with which another node is compared.
    is_comparing = any(step.stage is Stage.VERIFYING for step in steps.values())
    pending = [step for step in steps.values() if step.stage is Stage.PENDING and not is_comparing]
    for step in sorted(pending, key=lambda step: not step.owns_drain):  # drained nodes first
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
        started.append(node_step.start(step, node, rollout, now))
        if started[-1].stage in IN_PROGRESS:
            in_progress.add(address)
            if group is not None:
                active_per_group[group] -= 1
    reason = f"{WAITING_PREFIX}{wait_reason}" if wait_reason and not in_progress else ""
    # Keep the operator's last action as the reason until there is a newer reason.
    reason = reason or ("" if rollout.is_waiting else rollout.reason)
    updated = rollout.with_steps(*started)
    return updated if reason == rollout.reason else replace(updated, reason=reason)


def _advance_abort(rollout: Rollout, view: RolloutView, now: float) -> Rollout:
    """Advance an aborting rollout: end it when its actions have ended and its drains are released."""
    updated = rollout.with_steps(
        *(
            replace(step, owns_drain=False).enter(*_STAGES_AFTER_ABORT[step.stage], now)
            for step in rollout.steps.values()
            if step.stage in _STAGES_AFTER_ABORT
        )
    )
    if view.owned_drains or any(step.stage is Stage.STARTED for step in updated.steps.values()):
        return updated
    # The rollout owns no drains any more, not even of failed nodes.
    owned = [step for step in updated.steps.values() if step.owns_drain]
    updated = updated.with_steps(*(replace(step, owns_drain=False) for step in owned))
    return updated.enter(RolloutPhase.ABORTED, f"{rollout.reason}; {_outcome_summary(updated)}", now)


def _outcome_summary(rollout: Rollout) -> str:
    """Return the number of nodes by result, as text."""
    counts = Counter(step.stage for step in rollout.steps.values())
    parts = [f"{counts[Stage.DONE]} of {len(rollout.steps)} nodes done"]
    parts += [f"{counts[stage]} {stage}" for stage in (Stage.FAILED, Stage.SKIPPED) if counts[stage]]
    return ", ".join(parts)


def _effects(before: Rollout, after: Rollout, view: RolloutView, now: float) -> Effects:
    drain, run_action, probe_login, verify = list[str](), list[str](), list[str](), list[str]()
    for address, step in after.steps.items():
        if step.stage is Stage.STARTED and before.steps[address].stage is not Stage.STARTED:
            run_action.append(address)
        node = view.nodes.get(address)
        if node is None or after.phase is RolloutPhase.ABORTING:
            continue
        if step.stage is Stage.DRAINING and node.drain is None:
            drain.append(address)
        if node_step.needs_login_probe(step, node, after.spec, view, now):
            probe_login.append(address)
        if step.stage is Stage.VERIFYING:
            verify.append(address)
    undrain = [a for a in sorted(view.owned_drains) if not _keeps_drain(after, after.steps.get(a))]
    return Effects(tuple(drain), tuple(undrain), tuple(run_action), tuple(probe_login), tuple(verify))


def _keeps_drain(rollout: Rollout, step: Step | None) -> bool:
    """Return whether a node that the rollout drained stays drained."""
    if step is None or rollout.phase.is_over:
        return False
    if rollout.phase is RolloutPhase.ABORTING:
        return step.stage is Stage.STARTED
    return step.stage in (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.VERIFYING, Stage.FAILED) or (
        step.stage is Stage.PENDING and step.owns_drain
    )

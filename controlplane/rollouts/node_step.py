"""One node's step in a rollout: computes its next stage and the reason from the node's view. No I/O."""

from __future__ import annotations

from dataclasses import replace

from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, RolloutSpec, Stage, Step
from controlplane.rollouts.observation import RolloutNodeView, RolloutView

# Time after a drain's deadline for ending sessions: an idle session gets its FIN 10 s later.
_CLOSE_GRACE_SECONDS = 15.0
# A control plane observes this long before it declares a deadline missed: it may have been down when the
# node came back, and learns of that from PD and the first checks.
_MIN_OBSERVATION_SECONDS = 15.0
# Time beyond `healthy_for` in which a node that is healthy at its deadline may meet the other conditions.
_EXTRA_WAIT_SECONDS = 5.0
_UNKNOWN_NODE_REASON = "it is no longer known; waiting for it to return"


def start(step: Step, node: RolloutNodeView, rollout: Rollout, now: float) -> Step:
    """Start a pending node's step: drain it, or check its return if a retried node was restarted."""
    spec, step = rollout.spec, _with_drain_owner(step, node, rollout.id)
    if node.started_at is None:
        return failed(step, "its start time is unknown, so a restart could not be detected", now)
    drain_requested_at = now if step.drain_requested_at is None else step.drain_requested_at
    # With manual restarts, the operator may have restarted the node before its turn.
    may_be_restarted = spec.action == MANUAL or (
        step.drain_requested_at is not None and node.healthy_since is not None
    )
    if may_be_restarted and has_restarted(step, node) and not _version_mismatch(node, spec):
        reason = "it was already restarted, so it is not restarted again"
        return replace(
            step,
            stage=Stage.RETURNING,
            reason=reason,
            since=now,
            drain_requested_at=drain_requested_at,
            ended=None,
            interrupted=False,
        )
    return replace(
        step,
        stage=Stage.DRAINING,
        reason="its sessions migrate to other nodes",
        since=now,
        drain_requested_at=drain_requested_at,
        ended=None,
        started_before=node.started_at,
        version_before=step.version_before or node.version,
        sessions=node.sessions if step.drain_requested_at is None else step.sessions,
        interrupted=False,
    )


def advance(
    step: Step, node: RolloutNodeView | None, rollout: Rollout, view: RolloutView, now: float
) -> Step:
    """Return the next step; the same object if nothing changes. A started step waits for its action."""
    match step.stage:
        case Stage.PENDING:
            return _advance_pending(step, node, rollout, view, now)
        case Stage.FAILED if node is not None:
            return _with_drain_owner(step, node, rollout.id)
        case Stage.DRAINING if node is not None or view.is_complete:
            return _advance_draining(step, node, rollout, now)
        case Stage.RETURNING:
            return _advance_returning(step, node, rollout, view, now)
        case Stage.WARMING:
            return _advance_warming(step, node, rollout, view, now)
    return step


def failed(step: Step, reason: str, now: float) -> Step:
    """Return the step as failed."""
    return replace(step, stage=Stage.FAILED, reason=reason, since=now, ended=now)


def action_finished(step: Step, action: str, problem: str, now: float) -> Step:
    """Return a started step after its action has ended; `problem` is empty if it succeeded."""
    if problem:
        return failed(step, f"the action `{action}` {problem}", now)
    reason = f"the action `{action}` has finished; waiting for the node to come back"
    return replace(step, stage=Stage.RETURNING, reason=reason, since=now)


def action_interrupted(step: Step, action: str, now: float) -> Step:
    """Return a started step whose action nothing runs: its runner stopped or lost leadership."""
    reason = (
        f"the action `{action}` may have been interrupted, because the control plane that ran it stopped or"
        " lost leadership; it is not run again, and the node's start time and version show its result"
    )
    return replace(step, stage=Stage.RETURNING, reason=reason, since=now, interrupted=True)


def has_restarted(step: Step, node: RolloutNodeView) -> bool:
    """Return whether a node has restarted since its step began."""
    before = step.started_before
    return before is not None and node.started_at is not None and node.started_at > before


def _advance_pending(
    step: Step, node: RolloutNodeView | None, rollout: Rollout, view: RolloutView, now: float
) -> Step:
    """Advance a node before its turn. An unknown node may be restarting for another reason."""
    if node is not None and not node.is_removed:
        if step.reason == _UNKNOWN_NODE_REASON:
            step = replace(step, reason="", since=now)
        return _with_drain_owner(step, node, rollout.id) if step.drain_requested_at is not None else step
    if node is None and not view.is_complete:
        return step
    if node is None and step.reason != _UNKNOWN_NODE_REASON:
        return replace(step, reason=_UNKNOWN_NODE_REASON, since=now)
    if node is None and now < step.since + rollout.spec.return_deadline:
        return step
    if node is None and step.drain_requested_at is not None:
        return failed(step, "it no longer existed when it was to be retried", now)
    reason = "it no longer existed when its turn came"
    return replace(step, stage=Stage.SKIPPED, reason=reason, since=now, ended=now, drained_by_us=False)


def _advance_draining(step: Step, node: RolloutNodeView | None, rollout: Rollout, now: float) -> Step:
    spec = rollout.spec
    if node is None or node.is_removed:
        return failed(replace(step, drained_by_us=False), "it was removed while it was draining", now)
    if step.drained_by_us and node.drain is None:
        reason = "an operator canceled its drain before the action ran"
        return failed(replace(step, drained_by_us=False), reason, now)
    step = _with_drain_owner(step, node, rollout.id)
    if node.drain is None:
        return step
    if spec.action == MANUAL and has_restarted(step, node):
        return _to_returning(step, node, "it was restarted; waiting for it to pass its checks", now)
    deadline_passed = now >= step.since + spec.drain_deadline
    if deadline_passed and node.sessions and not step.closed:
        step = replace(step, closed=node.sessions)
    grace = _CLOSE_GRACE_SECONDS if spec.on_deadline is OnDeadline.CLOSE else 0.0
    if rollout.phase is not RolloutPhase.RUNNING or not (
        node.is_empty or now >= step.since + spec.drain_deadline + grace
    ):
        return step
    if spec.action == MANUAL:
        return _to_returning(step, node, "it can be restarted now; the rollout waits until it is back", now)
    if node.started_at is None:
        return failed(step, "its start time is no longer known", now)
    return replace(
        _with_session_counts(step, node),
        stage=Stage.STARTED,
        reason=f"the action `{spec.action}` is running",
        since=now,
        started_before=node.started_at,
        attempts=step.attempts + 1,
    )


def _to_returning(step: Step, node: RolloutNodeView, reason: str, now: float) -> Step:
    return replace(_with_session_counts(step, node), stage=Stage.RETURNING, reason=reason, since=now)


def _with_session_counts(step: Step, node: RolloutNodeView) -> Step:
    """Record the node's session counts in the step."""
    moved, failed_count = max(step.moved, node.moved), max(step.failed, node.failed)
    closed = max(step.closed, 0 if node.is_empty else node.sessions or 0)
    return replace(step, moved=moved, failed=failed_count, closed=closed)


def _with_drain_owner(step: Step, node: RolloutNodeView, rollout_id: str) -> Step:
    """Record whether the rollout owns the drain: an operator's drain of the node takes it over."""
    drained_by_us = node.drain is not None and node.drain.owner == rollout_id
    return step if step.drained_by_us is drained_by_us else replace(step, drained_by_us=drained_by_us)


def _advance_returning(
    step: Step, node: RolloutNodeView | None, rollout: Rollout, view: RolloutView, now: float
) -> Step:
    spec = rollout.spec
    deadline = max(step.since + spec.return_deadline, view.observing_since + _MIN_OBSERVATION_SECONDS)
    if node is not None and node.is_removed:
        return failed(replace(step, drained_by_us=False), "an operator removed it", now)
    if node is None:
        missing = "is no longer known"
    else:
        step = _with_drain_owner(step, node, rollout.id)
        if has_restarted(step, node) and step.version_after != node.version:
            step = replace(step, version_after=node.version)
        missing = _missing_condition(step, node, spec, view, now)
        if not missing:
            return _returned(step, node, now)
        since = node.healthy_since if has_restarted(step, node) else None
        if (
            since is not None
            and (mismatch := _version_mismatch(node, spec))
            and _is_healthy_long_enough(node, spec, now)
        ):
            return failed(step, f"it came back, but {mismatch}", now)
        # Only if healthy before the deadline: a node that fails repeatedly would be waited for forever.
        if since is not None and since <= deadline and now < since + spec.healthy_for + _EXTRA_WAIT_SECONDS:
            return step
    if now < deadline:
        return step
    cause = f"the action `{spec.action}` may have been interrupted, and " if step.interrupted else ""
    return failed(step, f"{cause}it was not back within {spec.return_deadline:g} s: it {missing}", now)


def _missing_condition(
    step: Step, node: RolloutNodeView, spec: RolloutSpec, view: RolloutView, now: float
) -> str:
    """Return the first unmet condition of a node's return, as a clause about it; empty if all are met."""
    if not has_restarted(step, node):
        return "has not registered with a newer start time"
    if node.healthy_since is None:
        return node.failure
    if not _is_healthy_long_enough(node, spec, now):
        return f"has not passed its checks for {spec.healthy_for:g} s yet"
    if mismatch := _version_mismatch(node, spec):
        return mismatch
    if view.checks_sql and (node.greeted_at is None or node.greeted_at < node.healthy_since):
        return "has not sent a greeting on its SQL port since"
    if view.probes_login:
        if node.login_result is None or node.login_result.at < node.healthy_since:
            return "has not passed the login probe yet"
        return node.login_result.problem
    return ""


def needs_login_probe(
    step: Step, node: RolloutNodeView, spec: RolloutSpec, view: RolloutView, now: float
) -> bool:
    """Return whether the login probe is the only condition of the node's return that is left."""
    return (
        view.probes_login
        and step.stage is Stage.RETURNING
        and not _missing_condition(step, node, spec, replace(view, probes_login=False), now)
    )


def _is_healthy_long_enough(node: RolloutNodeView, spec: RolloutSpec, now: float) -> bool:
    return node.healthy_since is not None and now - node.healthy_since >= spec.healthy_for


def _version_mismatch(node: RolloutNodeView, spec: RolloutSpec) -> str:
    if not spec.version or node.version == spec.version:
        return ""
    return f"has version {node.version or 'unknown'} instead of {spec.version}"


def _returned(step: Step, node: RolloutNodeView, now: float) -> Step:
    if node.drain is not None and not step.drained_by_us:
        reason = "it is back and stays drained, because an operator drained it"
        return replace(step, stage=Stage.DONE, reason=reason, since=now, ended=now)
    reason = "it is back and gradually gets its share of sessions"
    return replace(step, stage=Stage.WARMING, reason=reason, since=now, drained_by_us=False)


def _advance_warming(
    step: Step, node: RolloutNodeView | None, rollout: Rollout, view: RolloutView, now: float
) -> Step:
    if node is not None and node.drain is not None and node.drain.owner != rollout.id:
        reason = "it was back, but was drained again, not by this rollout"
        return replace(step, stage=Stage.DONE, reason=reason, since=now, ended=now)
    if node is not None and node.state is State.ACTIVE:
        if not node.is_warmed_up:
            return step
        return replace(step, stage=Stage.DONE, reason="it is in service again", since=now, ended=now)
    if now < max(step.since + rollout.spec.return_deadline, view.observing_since + _MIN_OBSERVATION_SECONDS):
        return step
    state = f"it is {node.state}: {node.reason}" if node is not None else "it is no longer known"
    return failed(step, f"it was back, but did not stay in service: {state}", now)

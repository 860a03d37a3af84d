"""Computes the next stage of a node's step in a rollout, and the reason, from the view. No I/O."""

from __future__ import annotations

from dataclasses import replace

from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, RolloutSpec, Stage, Step, Verification
from controlplane.model.views import DrainProgress
from controlplane.rollouts.observation import RolloutNodeView, RolloutView

# Time after a drain's deadline for closing sessions: an idle session gets its FIN 10 s after the deadline.
_CLOSE_GRACE_SECONDS = 15.0
# How long a control plane observes the nodes before it declares a deadline missed. If it was down when a
# node came back, it learns of the return only from PD and its first checks.
_MIN_OBSERVATION_SECONDS = 15.0
# A node that is healthy at its deadline has `healthy_for` plus this time, from when it became healthy, to
# meet the other conditions.
_EXTRA_WAIT_SECONDS = 5.0
_UNKNOWN_NODE_REASON = "it is no longer known; waiting for it to return"


def start(step: Step, node: RolloutNodeView, rollout: Rollout, now: float) -> Step:
    """Start a pending node's step: drain the node, or await its return if it was already restarted."""
    spec, step = rollout.spec, _with_drain_owner(step, node, rollout.id)
    if node.started_at is None:
        return step.enter(Stage.FAILED, "its start time is unknown, so a restart could not be detected", now)
    is_retry = step.drain_requested_at is not None
    # With manual restarts, the operator may have restarted the node before its turn.
    may_be_restarted = spec.action == MANUAL or (is_retry and node.healthy_since is not None)
    drain_requested_at = step.drain_requested_at if is_retry else now
    step = replace(step, drain_requested_at=drain_requested_at, interrupted=False)
    if may_be_restarted and has_restarted(step, node) and not _version_mismatch(node, spec):
        return step.enter(Stage.RETURNING, "it was already restarted, so it is not restarted again", now)
    step = replace(
        step,
        verification=Verification.NONE,
        started_before=node.started_at,
        version_before=step.version_before or node.version,
        sessions=step.sessions if is_retry else node.sessions,
    )
    return step.enter(Stage.DRAINING, "its sessions migrate to other nodes", now)


def advance(step: Step, rollout: Rollout, view: RolloutView, now: float) -> Step:
    """Return the step in its next stage; the same object if nothing changes.

    A step in the stage `started` or `verifying` is ended by its action or verification:
    `state_machine.action_ended` and `verification_ended`.
    """
    node = view.nodes.get(step.address)
    match step.stage:
        case Stage.PENDING:
            return _advance_pending(step, rollout, view, now)
        case Stage.FAILED if node is not None:
            return _with_drain_owner(step, node, rollout.id)
        case Stage.DRAINING if node is not None or view.is_complete:
            return _advance_draining(step, node, rollout, now)
        case Stage.RETURNING:
            return _advance_returning(step, rollout, view, now)
        case Stage.VERIFYING if node is not None:
            return _advance_verifying(step, node, rollout, now)
        case Stage.WARMING:
            return _advance_warming(step, rollout, view, now)
    return step


def has_restarted(step: Step, node: RolloutNodeView) -> bool:
    """Return whether a node has restarted since its step began."""
    before = step.started_before
    return before is not None and node.started_at is not None and node.started_at > before


def needs_login_probe(
    step: Step, node: RolloutNodeView, spec: RolloutSpec, view: RolloutView, now: float
) -> bool:
    """Return whether the login probe is the only unmet condition of the node's return."""
    is_probed = view.probes_login and step.stage is Stage.RETURNING
    return is_probed and not _missing_condition(step, node, spec, view, now)


def with_drain_progress(step: Step, progress: DrainProgress | None) -> Step:
    """Return the step with the sessions that its drain has migrated and failed to migrate so far."""
    if progress is None:
        return step
    return replace(
        step,
        migrated_sessions=max(step.migrated_sessions, progress.migrated),
        failed_migrations=max(step.failed_migrations, sum(progress.failed.values())),
    )


def _advance_pending(step: Step, rollout: Rollout, view: RolloutView, now: float) -> Step:
    """Advance a pending node. If the node is unknown, it may be restarting, so wait for it."""
    node = view.nodes.get(step.address)
    if node is None:
        if not view.is_complete:
            return step
        if step.reason != _UNKNOWN_NODE_REASON:
            return step.enter(Stage.PENDING, _UNKNOWN_NODE_REASON, now)
        if now < step.since + rollout.spec.return_deadline:
            return step
        if step.drain_requested_at is not None:
            return step.enter(Stage.FAILED, "it no longer existed when it was to be retried", now)
    elif not node.is_removed:
        if step.reason == _UNKNOWN_NODE_REASON:
            step = step.enter(Stage.PENDING, "", now)
        return _with_drain_owner(step, node, rollout.id) if step.drain_requested_at is not None else step
    reason = "it no longer existed when its turn came"
    return replace(step, owns_drain=False).enter(Stage.SKIPPED, reason, now)


def _advance_draining(step: Step, node: RolloutNodeView | None, rollout: Rollout, now: float) -> Step:
    spec = rollout.spec
    if node is None or node.is_removed:
        reason = "it was removed while it was draining"
        return replace(step, owns_drain=False).enter(Stage.FAILED, reason, now)
    if step.owns_drain and node.drain is None:
        reason = "an operator canceled its drain before the action ran"
        return replace(step, owns_drain=False).enter(Stage.FAILED, reason, now)
    step = _with_drain_owner(step, node, rollout.id)
    if node.drain is None:
        return step
    deadline = step.since + spec.drain_deadline
    if now >= deadline and node.sessions and not step.terminated_sessions:
        step = replace(step, terminated_sessions=node.sessions)
    if spec.action == MANUAL and has_restarted(step, node):
        reason = "it was restarted; waiting for it to pass its checks"
        return _with_final_counts(step, node).enter(Stage.RETURNING, reason, now)
    grace = _CLOSE_GRACE_SECONDS if spec.on_deadline is OnDeadline.CLOSE else 0.0
    if rollout.phase is not RolloutPhase.RUNNING or not (node.is_empty or now >= deadline + grace):
        return step
    if spec.action == MANUAL:
        reason = "it can be restarted now; the rollout waits until it is back"
        return _with_final_counts(step, node).enter(Stage.RETURNING, reason, now)
    if node.started_at is None:
        return step.enter(Stage.FAILED, "its start time is no longer known", now)
    started = replace(
        _with_final_counts(step, node), started_before=node.started_at, attempts=step.attempts + 1
    )
    return started.enter(Stage.STARTED, f"the action `{spec.action}` is running", now)


def _with_final_counts(step: Step, node: RolloutNodeView) -> Step:
    remaining = 0 if node.is_empty else node.sessions or 0
    step = replace(step, terminated_sessions=max(step.terminated_sessions, remaining))
    return with_drain_progress(step, node.drain_progress)


def _with_drain_owner(step: Step, node: RolloutNodeView, rollout_id: str) -> Step:
    """Record whether the rollout owns the drain. If an operator drains the node too, the operator owns it."""
    owns_drain = node.drain is not None and node.drain.owner == rollout_id
    return step if step.owns_drain is owns_drain else replace(step, owns_drain=owns_drain)


def _advance_returning(step: Step, rollout: Rollout, view: RolloutView, now: float) -> Step:
    node, spec = view.nodes.get(step.address), rollout.spec
    deadline = _return_deadline(step, spec, view)
    missing = "is no longer known"
    if node is not None:
        if node.is_removed:
            return replace(step, owns_drain=False).enter(Stage.FAILED, "an operator removed it", now)
        step = _with_drain_owner(step, node, rollout.id)
        if has_restarted(step, node) and step.version_after != node.version:
            step = replace(step, version_after=node.version)
        missing = _missing_condition(step, node, spec, view, now) or _login_problem(node, view)
        if not missing and needs_verification(step, spec):
            reason = f"it is back; reads of the capture {spec.capture} run on it and on an old node"
            return replace(step, verification=Verification.NONE).enter(Stage.VERIFYING, reason, now)
        if not missing and node.drain is not None and not step.owns_drain:
            reason = "it is back and stays drained, because an operator drained it"
            return step.enter(Stage.DONE, reason, now)
        if not missing:
            reason = "it is back and gradually gets its share of sessions"
            return replace(step, owns_drain=False).enter(Stage.WARMING, reason, now)
        if has_restarted(step, node) and (since := node.healthy_since) is not None:
            mismatch = _version_mismatch(node, spec)
            if mismatch and now - since >= spec.healthy_for:
                return step.enter(Stage.FAILED, f"it came back, but {mismatch}", now)
            # Only a node that was healthy at the deadline gets more time. Otherwise, a node that fails again
            # and again would get more time each time.
            if since <= deadline and now < since + spec.healthy_for + _EXTRA_WAIT_SECONDS:
                return step
    if now < deadline:
        return step
    cause = f"the action `{spec.action}` may have been interrupted, and " if step.interrupted else ""
    reason = f"{cause}it was not back within {spec.return_deadline:g} s: it {missing}"
    return step.enter(Stage.FAILED, reason, now)


def _advance_verifying(step: Step, node: RolloutNodeView, rollout: Rollout, now: float) -> Step:
    """Keep track of the node's drain. If the node fails meanwhile, its replay fails."""
    if node.is_removed:
        return replace(step, owns_drain=False).enter(Stage.FAILED, "an operator removed it", now)
    return _with_drain_owner(step, node, rollout.id)


def needs_verification(step: Step, spec: RolloutSpec) -> bool:
    """Return whether a node that is back must be verified before it returns to service."""
    return bool(spec.verify) and step.verification in (Verification.NONE, Verification.FAILED)


def _return_deadline(step: Step, spec: RolloutSpec, view: RolloutView) -> float:
    return max(step.since + spec.return_deadline, view.observing_since + _MIN_OBSERVATION_SECONDS)


def _missing_condition(
    step: Step, node: RolloutNodeView, spec: RolloutSpec, view: RolloutView, now: float
) -> str:
    """Return the first unmet condition of a node's return except the login; empty if all are met."""
    if not has_restarted(step, node):
        return "has not registered with a newer start time"
    if node.healthy_since is None:
        return node.failure
    if now - node.healthy_since < spec.healthy_for:
        return f"has not passed its checks for {spec.healthy_for:g} s yet"
    if mismatch := _version_mismatch(node, spec):
        return mismatch
    if view.checks_sql and (node.greeted_at is None or node.greeted_at < node.healthy_since):
        return "has not sent a greeting on its SQL port since"
    return ""


def _login_problem(node: RolloutNodeView, view: RolloutView) -> str:
    """Return why a healthy node has not passed the login probe; empty if it has, or if there is no probe."""
    if not view.probes_login:
        return ""
    if node.login_result is None or node.login_result.at < (node.healthy_since or 0.0):
        return "has not passed the login probe yet"
    return node.login_result.problem


def _version_mismatch(node: RolloutNodeView, spec: RolloutSpec) -> str:
    if not spec.version or node.version == spec.version:
        return ""
    return f"has version {node.version or 'unknown'} instead of {spec.version}"


def _advance_warming(step: Step, rollout: Rollout, view: RolloutView, now: float) -> Step:
    node = view.nodes.get(step.address)
    if node is not None and node.drain is not None and node.drain.owner != rollout.id:
        return step.enter(Stage.DONE, "it was back, but was drained again, not by this rollout", now)
    if node is not None and node.state is State.ACTIVE:
        return step.enter(Stage.DONE, "it is in service again", now) if node.is_warmed_up else step
    if now < _return_deadline(step, rollout.spec, view):
        return step
    state = f"it is {node.state}: {node.reason}" if node is not None else "it is no longer known"
    return step.enter(Stage.FAILED, f"it was back, but did not stay in service: {state}", now)

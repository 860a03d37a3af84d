"""One node's turn in a rollout: from what is seen of the node to its next stage, and why. Pure."""

from __future__ import annotations

from dataclasses import replace

from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Order, Phase, Rollout, Stage, Step
from controlplane.rollouts.observation import Seen, Sight

# Seconds after a drain's deadline in which sessions are ended: one that is idle gets its FIN 10 s later.
_CLOSING = 15.0
# Seconds that a control plane looks before it says that a deadline has passed: it may have been away when the
# node came back, and has to hear of it from PD and from the first checks.
_LOOK_FIRST = 15.0
# Seconds beyond `healthy_for` in which a node that is steady at its deadline may still fulfil the rest.
_REST = 5.0
_MISSED = "it is not known any more; it is waited for"


def begin(step: Step, seen: Seen, rollout: Rollout, now: float) -> Step:
    """A pending node's turn comes: it is drained, or, tried again and back meanwhile, is judged anew."""
    order, step = rollout.order, _owned(step, seen, rollout.id)
    if seen.started_at is None:
        return failed(step, "its start time is not known, so nobody could tell whether it was restarted", now)
    begun = now if step.begun is None else step.begun
    # A manual one may have been restarted before its turn, by whoever restarts them all in an order of his.
    here = order.action == MANUAL or (step.begun is not None and seen.steady_since is not None)
    if here and is_newer(step, seen) and not _mismatch(seen, order):
        reason = "it was restarted meanwhile, so it is not restarted again"
        return replace(
            step, stage=Stage.RETURNING, reason=reason, since=now, begun=begun, ended=None, cut_off=False
        )
    return replace(
        step,
        stage=Stage.DRAINING,
        reason="its sessions move to other nodes",
        since=now,
        begun=begun,
        ended=None,
        started_before=seen.started_at,
        version_before=step.version_before or seen.version,
        sessions=seen.sessions if step.begun is None else step.sessions,
        cut_off=False,
    )


def move(step: Step, seen: Seen | None, rollout: Rollout, sight: Sight, now: float) -> Step:
    """A node's next stage; the same step when nothing changes. A started one waits for its action's end."""
    match step.stage:
        case Stage.PENDING:
            return _wait(step, seen, rollout, sight, now)
        case Stage.FAILED if seen is not None:
            return _owned(step, seen, rollout.id)
        case Stage.DRAINING if seen is not None or sight.complete:
            return _drain(step, seen, rollout, now)
        case Stage.RETURNING:
            return _return(step, seen, rollout, sight, now)
        case Stage.WARMING:
            return _warm(step, seen, rollout, sight, now)
    return step


def failed(step: Step, reason: str, now: float) -> Step:
    """A step that went wrong."""
    return replace(step, stage=Stage.FAILED, reason=reason, since=now, ended=now)


def acted(step: Step, action: str, problem: str, now: float) -> Step:
    """A started step whose action has ended; `problem` says how it failed, and is empty when it did not."""
    if problem:
        return failed(step, f"the action `{action}` {problem}", now)
    reason = f"the action `{action}` is over; the node is to come back"
    return replace(step, stage=Stage.RETURNING, reason=reason, since=now)


def cut_off(step: Step, action: str, now: float) -> Step:
    """A started step that nobody is at: whoever ran its action ended, or does not lead any more."""
    reason = (
        f"the action `{action}` may have been cut off, for the control plane that ran it stopped or lost its"
        " lead; it is not run again, and the node's start time and version tell what came of it"
    )
    return replace(step, stage=Stage.RETURNING, reason=reason, since=now, cut_off=True)


def is_newer(step: Step, seen: Seen) -> bool:
    """Whether a node has started since its turn began."""
    before = step.started_before
    return before is not None and seen.started_at is not None and seen.started_at > before


def _wait(step: Step, seen: Seen | None, rollout: Rollout, sight: Sight, now: float) -> Step:
    """A node whose turn has not come. One that is not known may be restarting, for others than us."""
    if seen is not None and not seen.removed:
        if step.reason == _MISSED:
            step = replace(step, reason="", since=now)
        return _owned(step, seen, rollout.id) if step.begun is not None else step
    if seen is None and not sight.complete:
        return step
    if seen is None and step.reason != _MISSED:
        return replace(step, reason=_MISSED, since=now)
    if seen is None and now < step.since + rollout.order.return_deadline:
        return step
    if seen is None and step.begun is not None:
        return failed(step, "it was gone when it was to be tried again", now)
    reason = "it was gone before its turn"
    return replace(step, stage=Stage.SKIPPED, reason=reason, since=now, ended=now, drained_by_us=False)


def _drain(step: Step, seen: Seen | None, rollout: Rollout, now: float) -> Step:
    order = rollout.order
    if seen is None or seen.removed:
        return failed(replace(step, drained_by_us=False), "it was removed while it was being drained", now)
    if step.drained_by_us and seen.drain is None:
        reason = "its drain was taken back by an operator before the action was run"
        return failed(replace(step, drained_by_us=False), reason, now)
    step = _owned(step, seen, rollout.id)
    if seen.drain is None:
        return step
    if order.action == MANUAL and is_newer(step, seen):
        return _restarted(step, seen, "it was restarted; it is to pass its checks", now)
    late = now >= step.since + order.drain_deadline
    if late and seen.sessions and not step.closed:
        step = replace(step, closed=seen.sessions)
    grace = _CLOSING if order.on_deadline is OnDeadline.CLOSE else 0.0
    if rollout.phase is not Phase.RUNNING or not (
        seen.empty or now >= step.since + order.drain_deadline + grace
    ):
        return step
    if order.action == MANUAL:
        return _restarted(step, seen, "it can be restarted now; the rollout waits until it is back", now)
    if seen.started_at is None:
        return failed(step, "its start time is not known any more", now)
    return replace(
        _counted(step, seen),
        stage=Stage.STARTED,
        reason=f"the action `{order.action}` runs",
        since=now,
        started_before=seen.started_at,
        attempts=step.attempts + 1,
    )


def _restarted(step: Step, seen: Seen, reason: str, now: float) -> Step:
    return replace(_counted(step, seen), stage=Stage.RETURNING, reason=reason, since=now)


def _counted(step: Step, seen: Seen) -> Step:
    """With what has come of the node's sessions."""
    moved, stayed = max(step.moved, seen.moved), max(step.failed, seen.failed)
    closed = max(step.closed, 0 if seen.empty else seen.sessions or 0)
    return replace(step, moved=moved, failed=stayed, closed=closed)


def _owned(step: Step, seen: Seen, rollout: str) -> Step:
    """With whether the drain is the rollout's: an operator may drain a node that it has drained, too."""
    ours = seen.drain is not None and seen.drain.by == rollout
    return step if step.drained_by_us is ours else replace(step, drained_by_us=ours)


def _return(step: Step, seen: Seen | None, rollout: Rollout, sight: Sight, now: float) -> Step:
    order = rollout.order
    due = max(step.since + order.return_deadline, sight.since + _LOOK_FIRST)
    if seen is not None and seen.removed:
        return failed(replace(step, drained_by_us=False), "an operator removed it", now)
    if seen is None:
        lacks = "is not known any more"
    else:
        step = _owned(step, seen, rollout.id)
        if is_newer(step, seen) and step.version_after != seen.version:
            step = replace(step, version_after=seen.version)
        lacks = _lacks(step, seen, order, sight, now)
        if not lacks:
            return _back(step, seen, now)
        since = seen.steady_since if is_newer(step, seen) else None
        if since is not None and (mismatch := _mismatch(seen, order)) and _is_steady(seen, order, now):
            return failed(step, f"it came back, but {mismatch}", now)
        # Steady before it was due: one that falls again and again would be waited for without end.
        if since is not None and since <= due and now < since + order.healthy_for + _REST:
            return step
    if now < due:
        return step
    cause = f"the action `{order.action}` may have been cut off, and " if step.cut_off else ""
    return failed(step, f"{cause}it was not back within {order.return_deadline:g} s: it {lacks}", now)


def _lacks(step: Step, seen: Seen, order: Order, sight: Sight, now: float) -> str:
    """What a node lacks to be back, to be put after its name; empty: nothing."""
    if not is_newer(step, seen):
        return "has not registered with a newer start time"
    if seen.steady_since is None:
        return seen.ailing
    if not _is_steady(seen, order, now):
        return f"has not passed its checks for {order.healthy_for:g} s yet"
    if mismatch := _mismatch(seen, order):
        return mismatch
    if sight.checks_sql and (seen.greeted_at is None or seen.greeted_at < seen.steady_since):
        return "has not greeted on its SQL port since"
    if sight.asks_login:
        if seen.login is None or seen.login.at < seen.steady_since:
            return "has not been logged in to yet"
        return seen.login.problem
    return ""


def wants_login(step: Step, seen: Seen, order: Order, sight: Sight, now: float) -> bool:
    """Whether all but a session that is opened on the node tells that it is back."""
    return (
        sight.asks_login
        and step.stage is Stage.RETURNING
        and not _lacks(step, seen, order, replace(sight, asks_login=False), now)
    )


def _is_steady(seen: Seen, order: Order, now: float) -> bool:
    return seen.steady_since is not None and now - seen.steady_since >= order.healthy_for


def _mismatch(seen: Seen, order: Order) -> str:
    if not order.version or seen.version == order.version:
        return ""
    return f"has version {seen.version or 'unknown'} instead of {order.version}"


def _back(step: Step, seen: Seen, now: float) -> Step:
    if seen.drain is not None and not step.drained_by_us:
        reason = "it is back, and stays drained, for an operator drained it"
        return replace(step, stage=Stage.DONE, reason=reason, since=now, ended=now)
    reason = "it is back, and gets its share of sessions step by step"
    return replace(step, stage=Stage.WARMING, reason=reason, since=now, drained_by_us=False)


def _warm(step: Step, seen: Seen | None, rollout: Rollout, sight: Sight, now: float) -> Step:
    if seen is not None and seen.drain is not None and seen.drain.by != rollout.id:
        reason = "it was back; it is drained again, but not by this rollout"
        return replace(step, stage=Stage.DONE, reason=reason, since=now, ended=now)
    if seen is not None and seen.state is State.ACTIVE:
        if not seen.warm:
            return step
        return replace(step, stage=Stage.DONE, reason="it is in service again", since=now, ended=now)
    if now < max(step.since + rollout.order.return_deadline, sight.since + _LOOK_FIRST):
        return step
    why = f"it is {seen.state}: {seen.reason}" if seen is not None else "it is not known any more"
    return failed(step, f"it was back, but did not stay in service: {why}", now)

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
from controlplane.model.nodes import NOTHING
from controlplane.model.rollout import TAKEN, WAITS, Order, Phase, Rollout, Stage, Step
from controlplane.rollouts import node_step
from controlplane.rollouts.observation import Sight


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain this node, unless it is drained."""

    address: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """Take back the drain of this node if it is the rollout's."""

    address: str


@dataclass(frozen=True, slots=True)
class Act:
    """Run the action for this node; told once for each attempt."""

    address: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LogIn:
    """Open a session on this node and run a statement, unless that is under way."""

    address: str


Effect = Drain | Undrain | Act | LogIn


def create(
    name: str,
    order: Order,
    by: str,
    now: float,
    *,
    started: Mapping[str, float | None] = NOTHING,
    forced: bool = False,
) -> Rollout:
    """A new rollout; `started` are the start times of its nodes."""
    steps = {a: Step(a, since=now, started_before=started.get(a)) for a in order.nodes}
    return Rollout(name, order, by, now, since=now, steps=MappingProxyType(steps), forced=forced)


def advance(rollout: Rollout, sight: Sight, now: float) -> tuple[Rollout, tuple[Effect, ...]]:
    """The next state, to be durable before the effects are done; the same object when nothing changes."""
    if rollout.phase.is_over:
        return rollout, ()
    following = rollout
    if rollout.phase is Phase.ABORTING:
        following = _abandoned(rollout, sight, now)
    else:
        for address, step in rollout.steps.items():
            following = _with(following, node_step.move(step, sight.nodes.get(address), rollout, sight, now))
        if following.phase is Phase.RUNNING:
            following = _judged(following, sight, now)
        if following.phase is Phase.RUNNING:
            following = _begun(following, sight, now)
    return following, tuple(_effects(rollout, following, sight, now))


def pause(rollout: Rollout, by: str, now: float) -> Rollout:
    """Begin nothing more. RolloutRefused."""
    if rollout.phase is Phase.PAUSED:
        return rollout
    if rollout.phase is not Phase.RUNNING:
        raise _refused(rollout, "paused")
    return replace(rollout, phase=Phase.PAUSED, reason=f"paused by {by}", since=now)


def resume(rollout: Rollout, by: str, now: float) -> Rollout:
    """Go on; nodes that failed are tried again, each when its turn comes. RolloutRefused."""
    if rollout.phase is Phase.RUNNING:
        return rollout
    if rollout.phase is not Phase.PAUSED:
        raise _refused(rollout, "resumed")
    again = {
        a: replace(
            s, stage=Stage.PENDING, reason=f"to be tried again, for {by} resumed", since=now, ended=None
        )
        if s.stage is Stage.FAILED
        else s
        for a, s in rollout.steps.items()
    }
    return replace(
        rollout, phase=Phase.RUNNING, reason=f"resumed by {by}", since=now, steps=MappingProxyType(again)
    )


def abort(rollout: Rollout, by: str, now: float) -> Rollout:
    """Give back what was drained, and end. RolloutRefused."""
    if rollout.phase in (Phase.ABORTING, Phase.ABORTED):
        return rollout
    if rollout.phase.is_over:
        raise _refused(rollout, "aborted")
    return replace(rollout, phase=Phase.ABORTING, reason=f"aborted by {by}", since=now)


def act_ended(rollout: Rollout, address: str, attempt: int, problem: str, now: float) -> Rollout:
    """An action has ended; `problem` says how it failed, and is empty when it did not."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED or step.attempts != attempt:
        return rollout
    return _with(rollout, node_step.acted(step, rollout.order.action, problem, now))


def cut_off(rollout: Rollout, address: str, now: float) -> Rollout:
    """A step is found started, and nobody runs its action: it never runs again, but is judged by the node."""
    step = rollout.steps.get(address)
    if step is None or step.stage is not Stage.STARTED:
        return rollout
    return _with(rollout, node_step.cut_off(step, rollout.order.action, now))


def until(rollout: Rollout, now: float) -> Rollout:
    """A rollout that was kept, with no time after `now`: the clock of before may have been ahead."""
    steps = {
        a: replace(s, since=min(s.since, now), begun=_until(s.begun, now), ended=_until(s.ended, now))
        for a, s in rollout.steps.items()
    }
    since, created = min(rollout.since, now), min(rollout.created, now)
    return replace(
        rollout,
        since=since,
        created=created,
        ended=_until(rollout.ended, now),
        steps=MappingProxyType(steps),
    )


def _until(at: float | None, now: float) -> float | None:
    return at if at is None else min(at, now)


def _with(rollout: Rollout, step: Step) -> Rollout:
    if rollout.steps[step.address] is step:
        return rollout
    return replace(rollout, steps=rollout.with_step(step))


def _refused(rollout: Rollout, what: str) -> RolloutRefused:
    return RolloutRefused(f"the rollout {rollout.id} cannot be {what}", [f"it is {rollout.phase}"])


def _judged(rollout: Rollout, sight: Sight, now: float) -> Rollout:
    """Paused when too much has failed, done when all is done."""
    failures = [step for step in rollout.steps.values() if step.stage is Stage.FAILED]
    finished = not any(step.stage is Stage.PENDING or step.stage in TAKEN for step in rollout.steps.values())
    if failures and (
        finished or len(failures) > rollout.order.failure_budget or any(step.cut_off for step in failures)
    ):
        return replace(rollout, phase=Phase.PAUSED, reason=_failure(rollout, failures), since=now)
    if finished and not sight.ours:
        return replace(rollout, phase=Phase.DONE, reason=_outcome(rollout), since=now, ended=now)
    return rollout


def _failure(rollout: Rollout, failures: list[Step]) -> str:
    """Why a rollout pauses for nodes that failed, and how to go on."""
    last = max(failures, key=lambda step: step.since)
    more = f" ({len(failures)} nodes failed)" if len(failures) > 1 else ""
    kept = "; it stays drained" if last.drained_by_us else ""
    return (
        f"{last.address} failed: {last.reason}{kept}{more}. Once it is mended, `tidevoy rollout resume"
        f" {rollout.id}` goes on with it; `tidevoy rollout abort {rollout.id}` undrains it and ends"
    )


def _begun(rollout: Rollout, sight: Sight, now: float) -> Rollout:
    """With the nodes whose turn it is, as long as not too many are out of service at once."""
    order, steps = rollout.order, dict(rollout.steps)
    taken = {address for address, step in steps.items() if step.stage in TAKEN}
    # Nodes of ours that failed are out, too; how many of those may be is what the failure budget is for.
    spared = {a for a, s in steps.items() if s.stage is Stage.FAILED or s.drained_by_us}
    out = sight.out.keys() - taken - spared
    left = Counter(group for address, group in sight.active.items() if address not in taken)
    waiting = ""
    pending = [step for step in steps.values() if step.stage is Stage.PENDING]
    for step in sorted(pending, key=lambda step: not step.drained_by_us):  # those that are out already first
        address, seen = step.address, sight.nodes.get(step.address)
        if len(taken) >= order.max_unavailable:
            break
        group = sight.active.get(address)
        problem = ""
        if address in sight.busy:
            problem = f"the rollout {sight.busy[address]} has {address} in hand"
        elif len(taken) + len(out - {address}) >= order.max_unavailable:
            problem = f"a node is out of service already: {sight.out[min(out - {address})]}"
        elif group is not None and left[group] < 2 and not rollout.forced:
            problem = f"{address} is the only node{f' of the group {group}' if group else ''} in service"
        if problem or seen is None:
            waiting = waiting or problem
            continue
        steps[address] = node_step.begin(step, seen, rollout, now)
        if steps[address].stage in TAKEN:
            taken.add(address)
            if group is not None:
                left[group] -= 1
    reason = f"{WAITS}{waiting}" if waiting and not taken else ""
    # What an operator did last is worth knowing until there is something to say.
    reason = reason or ("" if rollout.waits else rollout.reason)
    if steps == rollout.steps and reason == rollout.reason:
        return rollout
    return replace(rollout, steps=MappingProxyType(steps), reason=reason)


def _abandoned(rollout: Rollout, sight: Sight, now: float) -> Rollout:
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
        following = _with(
            following, replace(step, stage=stage, reason=reason, since=now, ended=now, drained_by_us=False)
        )
    runs = any(step.stage is Stage.STARTED for step in following.steps.values())
    if runs or sight.ours:
        return following
    # Nothing is drained by us any more, whatever failed.
    steps = {a: replace(s, drained_by_us=False) if s.drained_by_us else s for a, s in following.steps.items()}
    return replace(
        following,
        phase=Phase.ABORTED,
        reason=f"{rollout.reason}; {_outcome(following)}",
        since=now,
        ended=now,
        steps=MappingProxyType(steps),
    )


def _outcome(rollout: Rollout) -> str:
    """How many nodes ended how."""
    counts = Counter(step.stage for step in rollout.steps.values())
    parts = [f"{counts[Stage.DONE]} of {len(rollout.steps)} nodes done"]
    parts += [f"{counts[stage]} {stage}" for stage in (Stage.FAILED, Stage.SKIPPED) if counts[stage]]
    return ", ".join(parts)


def _effects(before: Rollout, after: Rollout, sight: Sight, now: float) -> Iterator[Effect]:
    for address in sorted(sight.ours):
        if not _keeps(after, after.steps.get(address)):
            yield Undrain(address)
    for address, step in after.steps.items():
        seen = sight.nodes.get(address)
        if step.stage is Stage.STARTED and before.steps[address].stage is not Stage.STARTED:
            yield Act(address, step.attempts)
        if seen is None or after.phase is Phase.ABORTING:
            continue
        if step.stage is Stage.DRAINING and seen.drain is None:
            yield Drain(address)
        if node_step.wants_login(step, seen, after.order, sight, now):
            yield LogIn(address)


def _keeps(rollout: Rollout, step: Step | None) -> bool:
    """Whether a node that is drained by the rollout is to stay so."""
    if step is None or rollout.phase.is_over:
        return False
    if rollout.phase is Phase.ABORTING:
        return step.stage is Stage.STARTED
    return step.stage in (Stage.DRAINING, Stage.STARTED, Stage.RETURNING, Stage.FAILED) or (
        step.stage is Stage.PENDING and step.drained_by_us
    )


def progress(rollout: Rollout, sight: Mapping[str, tuple[int, int]]) -> Rollout:
    """With what has come so far of the sessions of nodes that are drained: by address, moved and failed."""
    steps = {
        a: replace(s, moved=max(s.moved, sight[a][0]), failed=max(s.failed, sight[a][1]))
        if a in sight and s.stage is Stage.DRAINING
        else s
        for a, s in rollout.steps.items()
    }
    return replace(rollout, steps=MappingProxyType(steps))

"""Derives events from two records of a rollout. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.events.event_messages import EventDraft
from controlplane.model.rollout import Rollout, RolloutPhase, Stage, Step

_NEW_STEP = Step("")
_EVENT_KIND_BY_PHASE = {
    RolloutPhase.RUNNING: "rollout.resumed",
    RolloutPhase.PAUSED: "rollout.paused",
    RolloutPhase.ABORTING: "rollout.aborting",
    RolloutPhase.DONE: "rollout.done",
    RolloutPhase.ABORTED: "rollout.aborted",
}


def rollout_events(before: Rollout | None, after: Rollout) -> Iterator[EventDraft]:
    """Return the events of a change; steps first, because they cause the phase change."""
    if before is None:
        spec = after.spec
        node_count = f"{len(spec.nodes)} {'node' if len(spec.nodes) == 1 else 'nodes'}"
        data = {"nodes": list(spec.nodes), "action": spec.action, "by": after.by}
        message = f"{after.by} started the rollout {after.id}: {node_count}, action `{spec.action}`"
        yield EventDraft("rollout.started", after.id, message, data)
    for address, step in after.steps.items():
        previous = before.steps.get(address, _NEW_STEP) if before is not None else _NEW_STEP
        if previous.stage is not step.stage:
            yield _step_event(after, previous, step)
    if (before.phase if before is not None else RolloutPhase.RUNNING) is not after.phase:
        message = f"the rollout {after.id} is {after.phase}: {after.reason}"
        data = {"phase": after.phase.value, "reason": after.reason}
        yield EventDraft(_EVENT_KIND_BY_PHASE[after.phase], after.id, message, data)
    if after.is_waiting and not (before is not None and before.is_waiting):
        yield EventDraft(
            "rollout.waiting", after.id, f"the rollout {after.id} {after.reason}", {"reason": after.reason}
        )


def _step_event(rollout: Rollout, previous: Step, step: Step) -> EventDraft:
    kind = "rollout.step_failed" if step.stage is Stage.FAILED else "rollout.step"
    data = {
        "node": step.address,
        "from": previous.stage.value,
        "to": step.stage.value,
        "reason": step.reason,
        "attempt": step.attempts,
    }
    return EventDraft(kind, rollout.id, f"{step.address} is {step.stage}: {step.reason}", data)

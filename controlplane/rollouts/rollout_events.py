"""Rollouts told as events: from the difference of two records of one. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.events.event_messages import Told
from controlplane.model.rollout import Phase, Rollout, Stage, Step

_BEGINNING = Step("")
_KINDS = {
    Phase.RUNNING: "rollout.resumed",
    Phase.PAUSED: "rollout.paused",
    Phase.ABORTING: "rollout.aborting",
    Phase.DONE: "rollout.done",
    Phase.ABORTED: "rollout.aborted",
}


def events(before: Rollout | None, after: Rollout) -> Iterator[Told]:
    """What became of a rollout; steps first, for they are why its phase changed."""
    if before is None:
        order = after.order
        many = f"{len(order.nodes)} {'node' if len(order.nodes) == 1 else 'nodes'}"
        data = {"nodes": list(order.nodes), "action": order.action, "by": after.by}
        message = f"{after.by} started the rollout {after.id}: {many}, action `{order.action}`"
        yield Told("rollout.started", after.id, message, data)
    for address, step in after.steps.items():
        past = before.steps.get(address, _BEGINNING) if before is not None else _BEGINNING
        if past.stage is not step.stage:
            yield _step(after, past, step)
    if (before.phase if before is not None else Phase.RUNNING) is not after.phase:
        message = f"the rollout {after.id} is {after.phase}: {after.reason}"
        data = {"phase": after.phase.value, "reason": after.reason}
        yield Told(_KINDS[after.phase], after.id, message, data)
    if after.waits and not (before is not None and before.waits):
        yield Told(
            "rollout.waits", after.id, f"the rollout {after.id} {after.reason}", {"reason": after.reason}
        )


def _step(rollout: Rollout, past: Step, step: Step) -> Told:
    kind = "rollout.step_failed" if step.stage is Stage.FAILED else "rollout.step"
    data = {
        "node": step.address,
        "from": past.stage.value,
        "to": step.stage.value,
        "reason": step.reason,
        "attempt": step.attempts,
    }
    return Told(kind, rollout.id, f"{step.address} is {step.stage}: {step.reason}", data)

"""Derives events from two records of a rollout. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from controlplane.events.event_messages import EventDraft
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import Rollout, RolloutPhase, Stage


def rollout_events(before: Rollout | None, after: Rollout) -> Iterator[EventDraft]:
    """Yield the events of a change; events of steps come first, because steps cause the phase change."""
    if before is None:
        spec, count = after.spec, len(after.spec.nodes)
        data = {"nodes": list(spec.nodes), "action": spec.action, "by": after.created_by}
        nodes = f"{count} {'node' if count == 1 else 'nodes'}"
        message = f"{after.created_by} started the rollout {after.id}: {nodes}, action `{spec.action}`"
        yield EventDraft("rollout.started", after.id, message, data)
        before = replace(after, phase=RolloutPhase.RUNNING, reason="", steps=EMPTY_MAP)
    for address, step in after.steps.items():
        previous = before.steps[address].stage if address in before.steps else Stage.PENDING
        if previous is not step.stage:
            kind = "rollout.step_failed" if step.stage is Stage.FAILED else "rollout.step"
            change = {
                "node": address,
                "from": previous.value,
                "to": step.stage.value,
                "reason": step.reason,
                "attempt": step.attempts,
            }
            yield EventDraft(kind, after.id, f"{address} is {step.stage}: {step.reason}", change)
    if before.phase is not after.phase:
        message = f"the rollout {after.id} is {after.phase}: {after.reason}"
        data = {"phase": after.phase.value, "reason": after.reason}
        verb = "resumed" if after.phase is RolloutPhase.RUNNING else after.phase.value
        yield EventDraft(f"rollout.{verb}", after.id, message, data)
    if after.is_waiting and not before.is_waiting:
        message = f"the rollout {after.id} {after.reason}"
        yield EventDraft("rollout.waiting", after.id, message, {"reason": after.reason})

"""Chooses the old node with which an upgraded node is compared. No I/O."""

from __future__ import annotations

from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.rollout import Rollout, Stage


def choose_baseline(rollout: Rollout, address: str, plan: Plan) -> str | None:
    """Return an old node in service of the same group, or None if there is none.

    Nodes whose turn is still to come are old, the last one first, unless they were tried before or already
    have the version to which this node has changed. So are nodes outside the rollout that have the version
    that the node had.
    """
    if address not in plan.nodes:
        return None
    group, version = plan.nodes[address].group, rollout.steps[address].version_before
    new_version = plan.nodes[address].version

    def serves(planned: NodePlan | None) -> bool:
        return planned is not None and planned.state is State.ACTIVE and planned.group == group

    def is_old(planned: NodePlan | None) -> bool:
        return planned is not None and (planned.version != new_version or new_version == version)

    pending = [
        step.address
        for step in rollout.steps.values()
        if step.stage is Stage.PENDING and step.drain_requested_at is None
    ]
    candidates = [
        other
        for other in reversed(pending)
        if serves(plan.nodes.get(other)) and is_old(plan.nodes.get(other))
    ]
    candidates += sorted(
        other
        for other, planned in plan.nodes.items()
        if other not in rollout.steps and serves(planned) and planned.version == version
    )
    return next(iter(candidates), None)

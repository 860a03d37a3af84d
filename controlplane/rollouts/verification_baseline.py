"""Chooses the old node with which an upgraded node is compared, and notices if either changes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """What tells two processes of a node apart. `started_at`: None if it is not known."""

    started_at: float | None
    version: str


def identify_processes(plan: Plan, addresses: Iterable[str]) -> Mapping[str, NodeProcess | None]:
    """Return the present processes of these nodes; None for a node that is not known."""
    nodes = {address: plan.nodes.get(address) for address in addresses}
    return {
        address: None if planned is None else NodeProcess(planned.node.started_at, planned.version)
        for address, planned in nodes.items()
    }


def find_changed_process(processes: Mapping[str, NodeProcess | None], plan: Plan) -> str:
    """Return which node is not the same process any more, as a sentence, or an empty string."""
    present = identify_processes(plan, processes)
    changed = [address for address, process in processes.items() if present[address] != process]
    return f"{changed[0]} was restarted or removed during the replay" if changed else ""

"""Selects the nodes of a rollout, and checks whether it may start now: problems and warnings. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from controlplane import address as addresses
from controlplane.config.rollouts import RolloutSettings
from controlplane.decide.inputs import Inputs
from controlplane.decide.views import envoys_with_migration_off, envoys_without_module
from controlplane.errors import RolloutRejected
from controlplane.model.health import blocks_migration
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan
from controlplane.model.rollout import MANUAL, Rollout, RolloutSpec
from controlplane.rollouts.observation import ClusterState
from controlplane.texts import some_of
from controlplane.version import parse_release

_SELECTOR_REMEDY = "write all, or labels as name=value,name=value, or addresses as host:port,host:port"
MAX_ROLLOUT_NODES = 2_000
"""It limits the size of a rollout's record: PD rejects values over 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """The result of a preflight. The version in `spec` has the format of the nodes' versions."""

    spec: RolloutSpec
    problems: tuple[str, ...] = ()  # block a start without force; one sentence each
    warnings: tuple[str, ...] = ()
    problems_despite_force: tuple[str, ...] = ()  # the problems that block a forced start too


def select_nodes(selector: str, nodes: Iterable[NodePlan]) -> tuple[str, ...]:
    """Return the selected addresses: listed addresses in the given order, otherwise sorted.

    Listed addresses may be unknown, which the preflight reports. `all` and labels select among the nodes that
    are not gone. Raises RolloutRejected if the selector is invalid or matches nothing.
    """
    parts = [part.strip() for part in selector.split(",")]
    if parts == ["all"]:
        labels: dict[str, str] = {}
    elif all("=" in part for part in parts):
        labels = dict(part.split("=", 1) for part in parts)
    else:
        return tuple(dict.fromkeys(_parse_address(part) for part in parts))
    candidates = (planned.node for planned in nodes if planned.state is not State.GONE)
    selected = sorted(node.address for node in candidates if labels.items() <= node.labels.items())
    if not selected:
        raise RolloutRejected(
            "no node was selected", [f"no node matches {selector}; `tidevoy nodes` lists the nodes"]
        )
    return tuple(selected)


def _parse_address(text: str) -> str:
    try:
        return addresses.join(*addresses.split(text))
    except ValueError as error:
        raise RolloutRejected("the node selector is invalid", [f"{error}; {_SELECTOR_REMEDY}"]) from None


def run_preflight(
    spec: RolloutSpec,
    cluster: ClusterState,
    active_rollouts: Iterable[Rollout],
    settings: RolloutSettings,
    verification_problem: str = "",
) -> PreflightResult:
    """Check whether a rollout with this spec may start.

    `verification_problem` says why this control plane cannot verify nodes; empty if it can.
    """
    version = parse_release(spec.version) or parse_release(f"v{spec.version}")
    spec = replace(spec, version=version or spec.version)
    despite_force = tuple(_problems_despite_force(spec, cluster, active_rollouts, settings))
    # The leader verifies nodes, and may be able to.
    local_problems = (verification_problem,) if verification_problem else ()
    problems = (*despite_force, *_overridable_problems(spec, cluster), *local_problems)
    warnings = tuple(_warnings(spec, cluster, probes_login=settings.probe.user is not None))
    return PreflightResult(spec, problems, warnings, despite_force)


def _problems_despite_force(
    spec: RolloutSpec, cluster: ClusterState, active_rollouts: Iterable[Rollout], settings: RolloutSettings
) -> Iterator[str]:
    nodes = cluster.plan.nodes
    if not spec.nodes:
        yield "the rollout has no nodes"
    if len(set(spec.nodes)) < len(spec.nodes):
        yield "a node is listed twice"
    if len(spec.nodes) > MAX_ROLLOUT_NODES:
        yield f"{len(spec.nodes)} nodes are too many for one rollout; the limit is {MAX_ROLLOUT_NODES}"
    if spec.version and not parse_release(spec.version):
        yield f"{spec.version!r} is not a TiDB release; write it as v8.5.3"
    action = settings.actions.get(spec.action)
    if spec.action != MANUAL and action is None:
        action_names = ", ".join((*sorted(settings.actions), MANUAL))
        yield f"no action is named {spec.action!r}; rollouts.actions in the configuration has {action_names}"
    elif action is not None and not spec.version and any("{version}" in text for text in action.command):
        yield f"the action {spec.action} uses {{version}}; set the version that the nodes are to get"
    for name in ("directory", "user"):
        if spec.verify and getattr(settings.verification, name) is None:
            yield f"nodes cannot be verified, because rollouts.verification.{name} is not set"
    if unknown := [a for a in spec.nodes if a not in nodes]:
        yield f"unknown nodes: {some_of(unknown)}; `tidevoy nodes` lists the known nodes"
    known = [nodes[a] for a in spec.nodes if a in nodes]
    if leaving := [planned.node.address for planned in known if planned.removal_since is not None]:
        yield f"nodes that are being removed: {some_of(leaving)}"
    if without_start_time := [p.node.address for p in known if p.node.started_at is None]:
        yield (
            f"the start time of {some_of(without_start_time)} is unknown, so a restart could not be"
            " detected; nodes that register in PD have a start time"
        )
    for rollout in active_rollouts:
        if common := [a for a in spec.nodes if a in rollout.steps]:
            yield f"the rollout {rollout.id} is still active and also has {some_of(common)}"


def _overridable_problems(spec: RolloutSpec, cluster: ClusterState) -> Iterator[str]:
    nodes = cluster.plan.nodes
    active = Counter(p.group for p in nodes.values() if p.state is State.ACTIVE)
    selected = Counter(nodes[a].group for a in spec.nodes if a in nodes and nodes[a].state is State.ACTIVE)
    for group, count in sorted(selected.items()):
        unavailable = min(count, spec.max_unavailable)
        if active[group] - unavailable < 1:
            in_group = f"of the group {group} " if group else ""
            yield (
                f"with {unavailable} out of service at a time, no other node {in_group}would be active;"
                " add nodes or lower max_unavailable"
            )
    if lacking_module := envoys_without_module(cluster.envoys):
        yield f"Envoys without Tidevoy's module cannot migrate sessions: {some_of(lacking_module)}"
    inputs = Inputs(cluster.plan, cluster.facts, cluster.policy, 0.0, cluster.intents.switch_overrides)
    if switched_off := envoys_with_migration_off(cluster.envoys, inputs):
        yield f"session migration is switched off in Envoys: {some_of(switched_off)}"
    blockers = {
        address: next(filter(blocks_migration, health.migration_blockers), "")
        for address in nodes
        if (health := cluster.facts.health.get(address)) is not None
    }
    if blocked := [address for address, blocker in blockers.items() if blocker]:
        names, first = some_of(blocked), blocked[0]
        yield f"sessions cannot migrate from or to {names} ({first}: {blockers[first]})"


def _warnings(spec: RolloutSpec, cluster: ClusterState, *, probes_login: bool) -> Iterator[str]:
    nodes, drains, removed = cluster.plan.nodes, cluster.intents.drains, cluster.intents.removed
    in_service = (State.ACTIVE, State.JOINING)
    if not any(envoy.connected_since is not None for envoy in cluster.envoys):
        yield "no Envoy is connected, so it is unknown whether nodes still have sessions"
    out_of_service = [a for a, planned in nodes.items() if planned.state not in in_service]
    if unavailable := [a for a in out_of_service if a not in drains and a not in removed]:
        yield f"already out of service, and counted against max_unavailable: {some_of(unavailable)}"
    if drained := [a for a in spec.nodes if a in drains]:
        yield f"already drained, and left drained afterwards: {some_of(drained)}"
    if spec.version and (
        upgraded := [a for a in spec.nodes if a in nodes and nodes[a].version == spec.version]
    ):
        yield f"already on {spec.version}, but restarted anyway: {some_of(upgraded)}"
    if not cluster.policy.status_check:
        yield "health.status is off, so it is unknown whether nodes have the certificates for migration"
    if not (cluster.policy.sql_check or cluster.policy.statement_check or probes_login):
        yield (
            "health.sql and health.statement are off and rollouts.probe is not set, so SQL ports are not"
            " checked"
        )

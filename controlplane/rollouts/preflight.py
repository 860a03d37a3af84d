"""Checks whether a rollout may start now: problems that block it, and warnings. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from controlplane.decide.views import envoys_without_module
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health, blocks_migration
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutSpec
from controlplane.release import parse_release
from controlplane.rollouts.observation import ClusterState

_UNCHECKED_HEALTH = Health()
_MAX_LISTED_NAMES = 3
MAX_ROLLOUT_NODES = 2_000
"""The limit of one record: PD rejects values over 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """The result of a preflight. The version in `spec` has the format of the nodes' versions."""

    spec: RolloutSpec
    problems: tuple[str, ...] = ()  # block a start without force; one sentence each
    warnings: tuple[str, ...] = ()
    unforceable_problems: tuple[str, ...] = ()  # the problems that block a forced start too


def run_preflight(
    spec: RolloutSpec,
    cluster: ClusterState,
    active_rollouts: Iterable[Rollout],
    placeholders_by_action: Mapping[str, Collection[str]],
    *,
    probes_login: bool,
) -> PreflightResult:
    """Check a spec. `placeholders_by_action` has the placeholders that each action's command uses."""
    version = parse_release(spec.version) or parse_release(f"v{spec.version}")
    spec = replace(spec, version=version or spec.version)
    unforceable = tuple(_unforceable_problems(spec, cluster, active_rollouts, placeholders_by_action))
    problems = tuple(_forceable_problems(spec, cluster))
    warnings = tuple(_warnings(spec, cluster, probes_login=probes_login))
    return PreflightResult(spec, (*unforceable, *problems), warnings, unforceable)


def _unforceable_problems(
    spec: RolloutSpec,
    cluster: ClusterState,
    active_rollouts: Iterable[Rollout],
    placeholders_by_action: Mapping[str, Collection[str]],
) -> Iterator[str]:
    known = cluster.plan.nodes
    if not spec.nodes:
        yield "the rollout has no nodes"
    if len(set(spec.nodes)) < len(spec.nodes):
        yield "a node is listed twice"
    if len(spec.nodes) > MAX_ROLLOUT_NODES:
        yield f"{len(spec.nodes)} nodes are too many for one rollout; the limit is {MAX_ROLLOUT_NODES}"
    durations = (spec.drain_deadline, spec.return_deadline, spec.healthy_for)
    if spec.max_unavailable < 1 or spec.failure_budget < 0:
        yield "max_unavailable must be at least 1, and failure_budget at least 0"
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in durations):
        yield "durations must be finite numbers of seconds, 0 or more"
    if spec.version and not parse_release(spec.version):
        yield f"{spec.version!r} is not a TiDB release; write it as v8.5.3"
    if spec.action != MANUAL and spec.action not in placeholders_by_action:
        action_names = ", ".join((*sorted(placeholders_by_action), MANUAL))
        yield f"no action is named {spec.action!r}; rollouts.actions in the configuration has {action_names}"
    elif not spec.version and "version" in placeholders_by_action.get(spec.action, ()):
        yield f"the action {spec.action} uses {{version}}; set the version that the nodes are to get"
    if unknown := [a for a in spec.nodes if a not in known]:
        yield f"unknown nodes: {_format_names(unknown)}; `tidevoy nodes` lists the known nodes"
    leaving = [a for a in spec.nodes if a in known and known[a].removal_since is not None]
    if leaving:
        yield f"nodes that are being removed: {_format_names(leaving)}"
    if without_start_time := [a for a in spec.nodes if a in known and known[a].node.started_at is None]:
        yield (
            f"the start time of {_format_names(without_start_time)} is unknown, so a restart could not be"
            " detected; nodes that register in PD have a start time"
        )
    for rollout in active_rollouts:
        if common := [a for a in spec.nodes if a in rollout.steps]:
            yield f"the rollout {rollout.id} is still active and also has {_format_names(common)}"


def _forceable_problems(spec: RolloutSpec, cluster: ClusterState) -> Iterator[str]:
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
        yield f"Envoys without Tidevoy's module cannot migrate sessions: {_format_names(lacking_module)}"
    blockers: dict[str, str] = {}
    for address in nodes:
        for blocker in cluster.facts.health.get(address, _UNCHECKED_HEALTH).migration_blockers:
            if blocks_migration(blocker):
                blockers.setdefault(address, blocker)
    if blockers:
        first = next(iter(blockers))
        names = _format_names(list(blockers))
        yield f"sessions cannot migrate from or to {names} ({first}: {blockers[first]})"


def _warnings(spec: RolloutSpec, cluster: ClusterState, *, probes_login: bool) -> Iterator[str]:
    nodes, drains = cluster.plan.nodes, cluster.intents.drains
    if not _has_connected_envoy(cluster.envoys):
        yield "no Envoy is connected, so it is unknown whether nodes still have sessions"
    unavailable = [
        a
        for a, p in nodes.items()
        if p.state not in (State.ACTIVE, State.JOINING)
        and a not in drains
        and a not in cluster.intents.removed
    ]
    if unavailable:
        yield f"already out of service, and counted against max_unavailable: {_format_names(unavailable)}"
    if drained := [a for a in spec.nodes if a in drains]:
        yield f"already drained, and left drained afterwards: {_format_names(drained)}"
    already_upgraded = [
        a for a in spec.nodes if spec.version and a in nodes and nodes[a].version == spec.version
    ]
    if already_upgraded:
        yield f"already on {spec.version}, but restarted anyway: {_format_names(already_upgraded)}"
    if not cluster.policy.status_check:
        yield "health.status is off, so it is unknown whether nodes have the certificates for migration"
    if not cluster.policy.sql_check and not probes_login:
        yield "health.sql is off and rollouts.probe is not set, so SQL ports are not checked"


def _has_connected_envoy(envoys: Iterable[EnvoyStatus]) -> bool:
    return any(envoy.connected_since is not None for envoy in envoys)


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more

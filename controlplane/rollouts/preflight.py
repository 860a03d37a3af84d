"""Whether a rollout may begin as things are: what speaks against it, and what is good to know. Pure."""

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
"""What fits into one record: PD takes none of over 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """What was found. `order` has its version in the form in which nodes have theirs."""

    spec: RolloutSpec
    problems: tuple[str, ...] = ()  # block a start that is not forced, a sentence each
    warnings: tuple[str, ...] = ()
    unforceable_problems: tuple[str, ...] = ()  # those of the problems that force does not help against


def run_preflight(
    spec: RolloutSpec,
    cluster: ClusterState,
    active_rollouts: Iterable[Rollout],
    placeholders_by_action: Mapping[str, Collection[str]],
    *,
    probes_login: bool,
) -> PreflightResult:
    """Check an order. `live`: the rollouts that are not over; `actions`: by name, the words it fills in."""
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
        yield "no node is named"
    if len(set(spec.nodes)) < len(spec.nodes):
        yield "a node is named twice"
    if len(spec.nodes) > MAX_ROLLOUT_NODES:
        yield f"{len(spec.nodes)} nodes are too many for one rollout; take at most {MAX_ROLLOUT_NODES} at a time"
    durations = (spec.drain_deadline, spec.return_deadline, spec.healthy_for)
    if spec.max_unavailable < 1 or spec.failure_budget < 0:
        yield "at least 1 node must be let out of service at a time, and no fewer than 0 may fail"
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in durations):
        yield "durations are seconds, 0 or more"
    if spec.version and not parse_release(spec.version):
        yield f"{spec.version!r} is no release of TiDB; write it as v8.5.3"
    if spec.action != MANUAL and spec.action not in placeholders_by_action:
        action_names = ", ".join((*sorted(placeholders_by_action), MANUAL))
        yield f"no action is named {spec.action!r}; rollouts.actions of the configuration has {action_names}"
    elif not spec.version and "version" in placeholders_by_action.get(spec.action, ()):
        yield f"the action {spec.action} fills in a version, so say which the nodes are to have"
    if unknown := [a for a in spec.nodes if a not in known]:
        yield f"not known: {_format_names(unknown)}; `tidevoy nodes` lists the nodes that are"
    leaving = [a for a in spec.nodes if a in known and known[a].removal_since is not None]
    if leaving:
        yield f"on their way out: {_format_names(leaving)}"
    if without_start_time := [a for a in spec.nodes if a in known and known[a].node.started_at is None]:
        yield (
            f"the start time is not known of {_format_names(without_start_time)}, so nobody could tell whether they were"
            " restarted; nodes that register in PD have one"
        )
    for rollout in active_rollouts:
        if common := [a for a in spec.nodes if a in rollout.steps]:
            yield f"the rollout {rollout.id} is not over and has {_format_names(common)}, too"


def _forceable_problems(spec: RolloutSpec, cluster: ClusterState) -> Iterator[str]:
    nodes = cluster.plan.nodes
    active = Counter(p.group for p in nodes.values() if p.state is State.ACTIVE)
    selected = Counter(nodes[a].group for a in spec.nodes if a in nodes and nodes[a].state is State.ACTIVE)
    for group, count in sorted(selected.items()):
        unavailable = min(count, spec.max_unavailable)
        if active[group] - unavailable < 1:
            where = f"of the group {group} " if group else ""
            yield (
                f"with {unavailable} out of service at a time, no other node {where}would be active;"
                " add nodes, or let fewer be out at a time"
            )
    if lacking_module := envoys_without_module(cluster.envoys):
        yield f"sessions cannot move in Envoys without Tidevoy's module: {_format_names(lacking_module)}"
    blockers: dict[str, str] = {}
    for address in nodes:
        for blocker in cluster.facts.health.get(address, _UNCHECKED_HEALTH).migration_blockers:
            if blocks_migration(blocker):
                blockers.setdefault(address, blocker)
    if blockers:
        first = next(iter(blockers))
        yield f"sessions cannot move from or to {_format_names(list(blockers))} ({first}: {blockers[first]})"


def _warnings(spec: RolloutSpec, cluster: ClusterState, *, probes_login: bool) -> Iterator[str]:
    nodes, drains = cluster.plan.nodes, cluster.intents.drains
    if not _has_connected_envoy(cluster.envoys):
        yield "no Envoy is connected, so nobody tells whether sessions are left"
    unavailable = [
        a
        for a, p in nodes.items()
        if p.state not in (State.ACTIVE, State.JOINING)
        and a not in drains
        and a not in cluster.intents.removed
    ]
    if unavailable:
        yield f"out of service already, and counted as such: {_format_names(unavailable)}"
    if drained := [a for a in spec.nodes if a in drains]:
        yield f"drained already, and to stay so afterwards: {_format_names(drained)}"
    already_upgraded = [
        a for a in spec.nodes if spec.version and a in nodes and nodes[a].version == spec.version
    ]
    if already_upgraded:
        yield f"of {spec.version} already, and yet restarted: {_format_names(already_upgraded)}"
    if not cluster.policy.status_check:
        yield "health.status is off, so nobody tells whether nodes have certificates to move sessions with"
    if not cluster.policy.sql_check and not probes_login:
        yield "health.sql is off and rollouts.probe is not set, so no SQL port is tried before clients come"


def _has_connected_envoy(envoys: Iterable[EnvoyStatus]) -> bool:
    return any(envoy.connected_since is not None for envoy in envoys)


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more

"""Whether a rollout may begin as things are: what speaks against it, and what is good to know. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from controlplane.decide.views import without_module
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.health import Health, forbids_moving
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Order, Rollout
from controlplane.release import release
from controlplane.rollouts.observation import Outlook

_UNCHECKED = Health()
_MOST_NAMED = 3
MOST_NODES = 2_000
"""What fits into one record: PD takes none of over 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class RolloutChecks:
    """What was found. `order` has its version in the form in which nodes have theirs."""

    order: Order
    problems: tuple[str, ...] = ()  # block a start that is not forced, a sentence each
    cautions: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()  # those of the problems that force does not help against


def check(
    order: Order,
    outlook: Outlook,
    live: Iterable[Rollout],
    actions: Mapping[str, Collection[str]],
    *,
    asks_login: bool,
) -> RolloutChecks:
    """Check an order. `live`: the rollouts that are not over; `actions`: by name, the words it fills in."""
    version = release(order.version) or release(f"v{order.version}")
    order = replace(order, version=version or order.version)
    refusals = tuple(_refusals(order, outlook, live, actions))
    problems = tuple(_problems(order, outlook))
    cautions = tuple(_cautions(order, outlook, asks_login=asks_login))
    return RolloutChecks(order, (*refusals, *problems), cautions, refusals)


def _refusals(
    order: Order, outlook: Outlook, live: Iterable[Rollout], actions: Mapping[str, Collection[str]]
) -> Iterator[str]:
    known = outlook.plan.nodes
    if not order.nodes:
        yield "no node is named"
    if len(set(order.nodes)) < len(order.nodes):
        yield "a node is named twice"
    if len(order.nodes) > MOST_NODES:
        yield f"{len(order.nodes)} nodes are too many for one rollout; take at most {MOST_NODES} at a time"
    durations = (order.drain_deadline, order.return_deadline, order.healthy_for)
    if order.max_unavailable < 1 or order.failure_budget < 0:
        yield "at least 1 node must be let out of service at a time, and no fewer than 0 may fail"
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in durations):
        yield "durations are seconds, 0 or more"
    if order.version and not release(order.version):
        yield f"{order.version!r} is no release of TiDB; write it as v8.5.3"
    if order.action != MANUAL and order.action not in actions:
        there = ", ".join((*sorted(actions), MANUAL))
        yield f"no action is named {order.action!r}; rollouts.actions of the configuration has {there}"
    elif not order.version and "version" in actions.get(order.action, ()):
        yield f"the action {order.action} fills in a version, so say which the nodes are to have"
    if strangers := [a for a in order.nodes if a not in known]:
        yield f"not known: {_named(strangers)}; `tidevoy nodes` lists the nodes that are"
    leaving = [a for a in order.nodes if a in known and known[a].leaving_since is not None]
    if leaving:
        yield f"on their way out: {_named(leaving)}"
    if undated := [a for a in order.nodes if a in known and known[a].node.started_at is None]:
        yield (
            f"the start time is not known of {_named(undated)}, so nobody could tell whether they were"
            " restarted; nodes that register in PD have one"
        )
    for rollout in live:
        if common := [a for a in order.nodes if a in rollout.steps]:
            yield f"the rollout {rollout.id} is not over and has {_named(common)}, too"


def _problems(order: Order, outlook: Outlook) -> Iterator[str]:
    nodes = outlook.plan.nodes
    active = Counter(p.group for p in nodes.values() if p.state is State.ACTIVE)
    taken = Counter(nodes[a].group for a in order.nodes if a in nodes and nodes[a].state is State.ACTIVE)
    for group, count in sorted(taken.items()):
        out = min(count, order.max_unavailable)
        if active[group] - out < 1:
            where = f"of the group {group} " if group else ""
            yield (
                f"with {out} out of service at a time, no other node {where}would be active;"
                " add nodes, or let fewer be out at a time"
            )
    if lacking := without_module(outlook.envoys):
        yield f"sessions cannot move in Envoys without Tidevoy's module: {_named(lacking)}"
    hindered: dict[str, str] = {}
    for address in nodes:
        for hindrance in outlook.facts.health.get(address, _UNCHECKED).hindrances:
            if forbids_moving(hindrance):
                hindered.setdefault(address, hindrance)
    if hindered:
        first = next(iter(hindered))
        yield f"sessions cannot move from or to {_named(list(hindered))} ({first}: {hindered[first]})"


def _cautions(order: Order, outlook: Outlook, *, asks_login: bool) -> Iterator[str]:
    nodes, drains = outlook.plan.nodes, outlook.intents.drains
    if not _connected(outlook.envoys):
        yield "no Envoy is connected, so nobody tells whether sessions are left"
    missed = [
        a
        for a, p in nodes.items()
        if p.state not in (State.ACTIVE, State.JOINING)
        and a not in drains
        and a not in outlook.intents.removed
    ]
    if missed:
        yield f"out of service already, and counted as such: {_named(missed)}"
    if drained := [a for a in order.nodes if a in drains]:
        yield f"drained already, and to stay so afterwards: {_named(drained)}"
    same = [a for a in order.nodes if order.version and a in nodes and nodes[a].version == order.version]
    if same:
        yield f"of {order.version} already, and yet restarted: {_named(same)}"
    if not outlook.policy.status_check:
        yield "health.status is off, so nobody tells whether nodes have certificates to move sessions with"
    if not outlook.policy.sql_check and not asks_login:
        yield "health.sql is off and rollouts.probe is not set, so no SQL port is tried before clients come"


def _connected(envoys: Iterable[EnvoyStatus]) -> bool:
    return any(envoy.connected_since is not None for envoy in envoys)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more

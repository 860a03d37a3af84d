"""From facts and intents to the plan: the one decision that everything else serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane import address as addresses
from controlplane.decide import health_verdict, lifecycle, node_sources, session_counts
from controlplane.decide.balance import locality
from controlplane.decide.balance.assign_weights import weigh
from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.facts import Facts
from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, State
from controlplane.model.plan import Advice, NodePlan, Plan, Policy
from controlplane.release import release

_UNCHECKED = Health()


def plan(previous: Plan, facts: Facts, intents: Intents, policy: Policy, now: float) -> Plan:
    """The next plan. `previous` is the last one, also one that was saved before a restart.

    Equal facts and intents give an equal plan, but for what time alone changes (slow start, graces).
    """
    nodes = node_sources.present(facts, intents)
    vouched = node_sources.vouched(facts, previous)
    planned: dict[str, NodePlan] = {}
    for address in sorted(nodes.keys() | previous.nodes.keys()):
        past = previous.nodes.get(address)
        node = nodes.get(address)
        listed = node is not None or address in vouched
        if past is not None and node is not None and _steady(past, node, facts, intents, policy):
            planned[address] = past
            continue
        current = node or (node_sources.wished(past.node, intents) if past is not None else None)
        if current is None:  # pragma: no cover - an address comes from one of the two
            continue
        evidence = _evidence(current, listed, past, facts, intents, policy, now)
        following = lifecycle.advance(past, evidence, policy, now)
        if following is not None:
            planned[address] = following
    planned, floor = _hold_floor(planned, previous, facts, intents, policy)
    weighed, full, at = weigh(_placed(planned, policy), previous, facts, policy, now)
    asked = rebalance(weighed, full, floor, previous, facts, policy, now)
    return Plan(weighed, floor, asked, at, full)


def _placed(planned: Mapping[str, NodePlan], policy: Policy) -> dict[str, NodePlan]:
    """Which nodes each one serves with, and where it is."""
    placed = {}
    for address, each in planned.items():
        group, backup, zone = locality.place(each.node, policy)
        same = group == each.group and backup is each.backup and zone == each.zone
        placed[address] = each if same else replace(each, group=group, backup=backup, zone=zone)
    return placed


def checked(planned: Plan, facts: Facts, policy: Policy) -> bool:
    """Whether no node is absent from the plan merely because its first checks have not ended."""
    return not any(
        each.state is State.JOINING
        and health_verdict.unchecked(
            facts.health.get(address, _UNCHECKED),
            has_status=each.node.status_address is not None,
            policy=policy,
        )
        for address, each in planned.nodes.items()
    )


def _steady(past: NodePlan, node: Node, facts: Facts, intents: Intents, policy: Policy) -> bool:
    """Whether a node in service stays as it is: what nearly all nodes do nearly always, told cheaply."""
    health = facts.health.get(node.address, _UNCHECKED)
    sql, status = health.sql, health.status
    return (
        past.state is State.ACTIVE
        and past.node is node
        and past.reason == lifecycle.IN_SERVICE
        and node.registered
        and past.unregistered_since is None
        and node.address not in intents.drains
        and node.address not in intents.removed
        and (not policy.sql_check or (sql is not None and sql.outcome is Outcome.PASS))
        and (
            not policy.status_check
            or node.status_address is None
            or (status is not None and status.outcome is Outcome.PASS)
        )
        # An address that is an endpoint, too, has no name that could lead elsewhere.
        and (past.endpoint == node.address or endpoint(node, past, facts)[0] == past.endpoint)
        and _version(node, health) == past.version
    )


def _version(node: Node, health: Health) -> str:
    """Its release, by PD or by itself."""
    return release(node.version) or release(health.version)


def endpoint(node: Node, past: NodePlan | None, facts: Facts) -> tuple[str | None, str]:
    """Where a node's SQL address leads (`ip:port`), and why it leads nowhere.

    A name that does not resolve (any more) keeps the endpoint that it had.
    """
    host, port = addresses.split(node.address)
    literal = addresses.literal_ip(host)
    if literal is not None:
        return addresses.join(literal, port), ""
    resolution = facts.resolutions.get(host)
    if resolution is not None and resolution.ip is not None:
        return addresses.join(resolution.ip, port), ""
    if past is not None and past.endpoint is not None:
        return past.endpoint, ""
    reason = resolution.reason if resolution is not None else ""
    return None, reason or f"the name {host} has not been looked up yet"


def _evidence(
    node: Node,
    listed: bool,
    past: NodePlan | None,
    facts: Facts,
    intents: Intents,
    policy: Policy,
    now: float,
) -> lifecycle.Evidence:
    address = node.address
    where, unresolved = endpoint(node, past, facts)
    health = facts.health.get(address, _UNCHECKED)
    removed_since = intents.removed.get(address)
    drain = intents.drains.get(address)
    closed = past.closed_since if past is not None else None
    leaving = closed is not None or not listed or drain is not None or removed_since is not None
    return lifecycle.Evidence(
        node=node,
        listed=listed,
        removed_since=removed_since,
        drain=drain,
        health=health,
        endpoint=where,
        unresolved=unresolved,
        occupied=leaving and session_counts.known(address, where, facts) > 0,
        empty=leaving
        and session_counts.surely_empty(
            address, where, now if closed is None else closed, facts, policy, now
        ),
        version=_version(node, health),
        overdue=drain is not None and now >= drain.since + drain.deadline_seconds,
    )


def _hold_floor(
    planned: dict[str, NodePlan], previous: Plan, facts: Facts, intents: Intents, policy: Policy
) -> tuple[dict[str, NodePlan], str]:
    """Keep nodes in service that look down when so many do at once that the checks are the likelier cause.

    Only nodes that somebody vouches for count: those whose registration has lapsed are down for good. When
    nothing at all would be in service, nodes that leave of their own accord but still greet serve on.
    """
    active = sum(p.state is State.ACTIVE for p in planned.values())
    failed = [p for p in planned.values() if p.state is State.UNHEALTHY and p.node.registered]
    kept, floor = [], ""
    if failed and active < policy.floor * (active + len(failed)):
        kept = failed
        floor = (
            f"only {active} of {active + len(failed)} nodes pass their checks, below the floor "
            f"of {policy.floor:.0%}, so those that fail are kept in service"
        )
    if not active:
        asked = intents.drains.keys() | intents.removed.keys()
        greeting = [
            p
            for a, p in planned.items()
            if _waning(p, a in asked)
            and _may_greet(facts.health.get(a, _UNCHECKED).sql, previous.nodes.get(a), policy)
        ]
        kept = [*kept, *greeting]
        if greeting and not floor:
            floor = "no other node is left, so those that are leaving but still greet are kept in service"
    return planned | {p.node.address: _keep(p) for p in kept}, floor


def _waning(planned: NodePlan, asked: bool) -> bool:
    """Whether it is out of service, or leaves, for other reasons than that an operator asked for it."""
    return not asked and planned.state not in (State.ACTIVE, State.JOINING)


def _may_greet(probe: Probe | None, past: NodePlan | None, policy: Policy) -> bool:
    """Whether it greets or, when it was in service and a start has left it unchecked, may well do."""
    if probe is None:
        return policy.sql_check and past is not None and past.advice is Advice.HEALTHY
    return probe.outcome is Outcome.PASS


def _keep(planned: NodePlan) -> NodePlan:
    return replace(planned, advice=Advice.HEALTHY, closed_since=None)  # `weigh` gives it a weight

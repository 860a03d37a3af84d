"""From facts and intents to the plan: the one decision that everything else serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane import address as addresses
from controlplane.decide import health_verdict, lifecycle, node_sources, session_counts
from controlplane.decide.balance import locality
from controlplane.decide.balance.assign_weights import assign_weights
from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.release import parse_release

_UNCHECKED_HEALTH = Health()


def plan(previous: Plan, facts: Facts, intents: Intents, policy: Policy, now: float) -> Plan:
    """The next plan. `previous` is the last one, also one that was saved before a restart.

    Equal facts and intents give an equal plan, but for what time alone changes (slow start, graces).
    """
    nodes = node_sources.merged_nodes(facts, intents)
    retained = node_sources.retained(facts, previous)
    planned: dict[str, NodePlan] = {}
    for address in sorted(nodes.keys() | previous.nodes.keys()):
        past = previous.nodes.get(address)
        node = nodes.get(address)
        listed = node is not None or address in retained
        if past is not None and node is not None and _is_unchanged(past, node, facts, intents, policy):
            planned[address] = past
            continue
        current = node or (node_sources.with_overrides(past.node, intents) if past is not None else None)
        if current is None:  # pragma: no cover - an address comes from one of the two
            continue
        observation = _observe_node(current, listed, past, facts, intents, policy, now)
        next_node_plan = lifecycle.advance(past, observation, policy, now)
        if next_node_plan is not None:
            planned[address] = next_node_plan
    planned, panic_threshold_reason = _apply_panic_threshold(planned, previous, facts, intents, policy)
    weighted, overloaded_zones, computed_at = assign_weights(
        _with_groups(planned, policy), previous, facts, policy, now
    )
    rebalance_state = rebalance(
        weighted, overloaded_zones, panic_threshold_reason, previous, facts, policy, now
    )
    return Plan(weighted, panic_threshold_reason, rebalance_state, computed_at, overloaded_zones)


def _with_groups(planned: Mapping[str, NodePlan], policy: Policy) -> dict[str, NodePlan]:
    """Which nodes each one serves with, and where it is."""
    grouped = {}
    for address, each in planned.items():
        group, backup, zone = locality.classify(each.node, policy)
        same = group == each.group and backup is each.backup and zone == each.zone
        grouped[address] = each if same else replace(each, group=group, backup=backup, zone=zone)
    return grouped


def has_completed_first_checks(planned: Plan, facts: Facts, policy: Policy) -> bool:
    """Whether no node is absent from the plan merely because its first checks have not ended."""
    return not any(
        each.state is State.JOINING
        and health_verdict.checks_pending(
            facts.health.get(address, _UNCHECKED_HEALTH),
            has_status_address=each.node.status_address is not None,
            policy=policy,
        )
        for address, each in planned.nodes.items()
    )


def _is_unchanged(past: NodePlan, node: Node, facts: Facts, intents: Intents, policy: Policy) -> bool:
    """Whether a node in service stays as it is: what nearly all nodes do nearly always, told cheaply."""
    health = facts.health.get(node.address, _UNCHECKED_HEALTH)
    sql, status = health.sql, health.status
    return (
        past.state is State.ACTIVE
        and past.node is node
        and past.reason == lifecycle.IN_SERVICE_REASON
        and node.registered
        and past.unregistered_since is None
        and node.address not in intents.drains
        and node.address not in intents.removed
        and (not policy.sql_check or (sql is not None and sql.status is CheckStatus.PASS))
        and (
            not policy.status_check
            or node.status_address is None
            or (status is not None and status.status is CheckStatus.PASS)
        )
        # An address that is an endpoint, too, has no name that could lead elsewhere.
        and (past.endpoint == node.address or resolve_endpoint(node, past, facts)[0] == past.endpoint)
        and _node_version(node, health) == past.version
    )


def _node_version(node: Node, health: Health) -> str:
    """Its release, by PD or by itself."""
    return parse_release(node.version) or parse_release(health.version)


def resolve_endpoint(node: Node, past: NodePlan | None, facts: Facts) -> tuple[str | None, str]:
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


def _observe_node(
    node: Node,
    is_listed: bool,
    past: NodePlan | None,
    facts: Facts,
    intents: Intents,
    policy: Policy,
    now: float,
) -> lifecycle.NodeObservation:
    address = node.address
    resolved, resolve_error = resolve_endpoint(node, past, facts)
    health = facts.health.get(address, _UNCHECKED_HEALTH)
    removed_since = intents.removed.get(address)
    drain = intents.drains.get(address)
    closed_at = past.closed_since if past is not None else None
    is_leaving = closed_at is not None or not is_listed or drain is not None or removed_since is not None
    return lifecycle.NodeObservation(
        node=node,
        is_listed=is_listed,
        removed_since=removed_since,
        drain=drain,
        health=health,
        endpoint=resolved,
        resolve_error=resolve_error,
        has_sessions=is_leaving and session_counts.reported(address, resolved, facts) > 0,
        is_confirmed_empty=is_leaving
        and session_counts.is_confirmed_empty(
            address, resolved, now if closed_at is None else closed_at, facts, policy, now
        ),
        version=_node_version(node, health),
        is_overdue=drain is not None and now >= drain.since + drain.deadline_seconds,
    )


def _apply_panic_threshold(
    planned: dict[str, NodePlan], previous: Plan, facts: Facts, intents: Intents, policy: Policy
) -> tuple[dict[str, NodePlan], str]:
    """Keep nodes in service that look down when so many do at once that the checks are the likelier cause.

    Only nodes that somebody vouches for count: those whose registration has lapsed are down for good. When
    nothing at all would be in service, nodes that leave of their own accord but still greet serve on.
    """
    active = sum(p.state is State.ACTIVE for p in planned.values())
    failed = [p for p in planned.values() if p.state is State.UNHEALTHY and p.node.registered]
    kept, reason = [], ""
    if failed and active < policy.panic_threshold * (active + len(failed)):
        kept = failed
        reason = (
            f"only {active} of {active + len(failed)} nodes pass their checks, below the floor "
            f"of {policy.panic_threshold:.0%}, so those that fail are kept in service"
        )
    if not active:
        requested = intents.drains.keys() | intents.removed.keys()
        greeting = [
            p
            for a, p in planned.items()
            if _is_leaving_unasked(p, a in requested)
            and _may_greet(facts.health.get(a, _UNCHECKED_HEALTH).sql, previous.nodes.get(a), policy)
        ]
        kept = [*kept, *greeting]
        if greeting and not reason:
            reason = "no other node is left, so those that are leaving but still greet are kept in service"
    return planned | {p.node.address: _keep_healthy(p) for p in kept}, reason


def _is_leaving_unasked(planned: NodePlan, is_requested: bool) -> bool:
    """Whether it is out of service, or leaves, for other reasons than that an operator asked for it."""
    return not is_requested and planned.state not in (State.ACTIVE, State.JOINING)


def _may_greet(probe: CheckResult | None, past: NodePlan | None, policy: Policy) -> bool:
    """Whether it greets or, when it was in service and a start has left it unchecked, may well do."""
    if probe is None:
        return policy.sql_check and past is not None and past.eds_health is EdsHealth.HEALTHY
    return probe.status is CheckStatus.PASS


def _keep_healthy(planned: NodePlan) -> NodePlan:
    return replace(planned, eds_health=EdsHealth.HEALTHY, closed_since=None)  # `weigh` gives it a weight

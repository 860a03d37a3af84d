"""Compute the plan for all nodes from facts and intents. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane import address as addresses
from controlplane.decide import lifecycle, node_sources, session_counts
from controlplane.decide.balance import locality
from controlplane.decide.balance.assign_weights import assign_weights
from controlplane.decide.balance.rebalance import rebalance
from controlplane.decide.inputs import Inputs
from controlplane.decide.limits import plan_limits
from controlplane.model.capture import Capture
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.version import parse_release

_UNCHECKED_HEALTH = Health()


def compute_plan(
    previous: Plan,
    facts: Facts,
    intents: Intents,
    policy: Policy,
    now: float,
    *,
    is_standalone: bool = False,
) -> Plan:
    """Return the next plan. `previous` is the last plan; after a restart, the saved one.

    `is_standalone`: this replica decides only for its own Envoys, and other replicas do so too.

    Equal facts and intents give an equal plan, except for changes over time (slow start, grace periods).
    """
    inputs = Inputs(previous, facts, policy, now, intents.switch_overrides)
    nodes = node_sources.merged_nodes(facts, intents)
    possibly_listed = node_sources.addresses_of_incomplete_sources(facts, previous)
    planned: dict[str, NodePlan] = {}
    for address in sorted(nodes.keys() | previous.nodes.keys()):
        past = previous.nodes.get(address)
        node = nodes.get(address)
        is_listed = node is not None or address in possibly_listed
        if past is not None and node is not None and _is_unchanged(past, node, facts, intents, policy):
            planned[address] = past
            continue
        current = node or (node_sources.with_overrides(past.node, intents) if past is not None else None)
        if current is None:  # pragma: no cover - each address is in `nodes` or in `previous`
            continue
        observation = _observe_node(current, is_listed, past, intents, inputs)
        next_node_plan = lifecycle.advance(past, observation, policy, now)
        if next_node_plan is not None:
            planned[address] = next_node_plan
    planned, panic_threshold_reason = _apply_panic_threshold(planned, previous, facts, intents, policy)
    weighted, overloaded_zones, computed_at = assign_weights(_with_groups(planned, policy), inputs)
    rebalance_state = rebalance(weighted, overloaded_zones, panic_threshold_reason, inputs)
    return Plan(
        weighted,
        panic_threshold_reason,
        rebalance_state,
        computed_at,
        overloaded_zones,
        intents.switch_overrides,
        plan_limits(inputs, may_raise=not is_standalone),
        intents.rules,
        _running_capture(intents, policy, now),
    )


def _running_capture(intents: Intents, policy: Policy, now: float) -> Capture | None:
    """Return the capture that is running; None also if captures have been switched off since its start."""
    capture, is_allowed = intents.capture, policy.capture_directory is not None
    return capture if capture is not None and capture.is_running(now) and is_allowed else None


def _with_groups(planned: Mapping[str, NodePlan], policy: Policy) -> dict[str, NodePlan]:
    """Set the group, backup role and zone of each node from its labels."""
    grouped = {}
    for address, node_plan in planned.items():
        group, backup, zone = locality.classify(node_plan.node, policy)
        is_same = group == node_plan.group and backup is node_plan.backup and zone == node_plan.zone
        grouped[address] = node_plan if is_same else replace(node_plan, group=group, backup=backup, zone=zone)
    return grouped


def has_completed_first_checks(planned: Plan, facts: Facts, policy: Policy) -> bool:
    """Return whether all joining nodes have a first result of each check."""
    return not any(
        node_plan.state is State.JOINING
        and (
            (policy.sql_check and health.sql is None)
            or (policy.statement_check and health.statement is None)
            or (policy.status_check and node_plan.node.status_address is not None and health.status is None)
        )
        for address, node_plan in planned.nodes.items()
        for health in (facts.health.get(address, _UNCHECKED_HEALTH),)
    )


def _is_unchanged(past: NodePlan, node: Node, facts: Facts, intents: Intents, policy: Policy) -> bool:
    """Return whether a node in service stays unchanged: the common case, which needs no full computation."""
    health = facts.health.get(node.address, _UNCHECKED_HEALTH)
    sql, status, statement = health.sql, health.status, health.statement
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
        and (
            not policy.statement_check or (statement is not None and statement.status is not CheckStatus.FAIL)
        )
        # If the address equals the endpoint, it is a literal IP and needs no resolution.
        and (past.endpoint == node.address or resolve_endpoint(node, past, facts)[0] == past.endpoint)
        and _node_version(node, health) == past.version
    )


def _node_version(node: Node, health: Health) -> str:
    """Return the TiDB release that the node registered in PD, else the one from `GET /status`."""
    return parse_release(node.version) or parse_release(health.version)


def resolve_endpoint(node: Node, past: NodePlan | None, facts: Facts) -> tuple[str | None, str]:
    """Return the endpoint (`ip:port`) of a node, or None and the reason why it has none.

    If the host name no longer resolves, the last endpoint stays.
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
    return None, reason or f"the name {host} has not been resolved yet"


def _observe_node(
    node: Node, is_listed: bool, past: NodePlan | None, intents: Intents, inputs: Inputs
) -> lifecycle.NodeObservation:
    address, facts, now = node.address, inputs.facts, inputs.now
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
        has_sessions=is_leaving and session_counts.sessions_reported_by_envoys(address, resolved, facts) > 0,
        is_confirmed_empty=is_leaving
        and session_counts.is_confirmed_empty(
            address, resolved, now if closed_at is None else closed_at, inputs
        ),
        version=_node_version(node, health),
        is_overdue=drain is not None and now >= drain.since + drain.deadline_seconds,
        missing_envoys=session_counts.missing_envoys(inputs) if drain is not None else (),
    )


def _apply_panic_threshold(
    planned: dict[str, NodePlan], previous: Plan, facts: Facts, intents: Intents, policy: Policy
) -> tuple[dict[str, NodePlan], str]:
    """Keep failing nodes in service if so many fail that the checks themselves are probably at fault.

    Only registered nodes count as failing, since a node whose registration has expired is probably down. If
    no node is active, all nodes that still accept logins stay in service unless an operator drains or removes
    them.
    """
    active = sum(p.state is State.ACTIVE for p in planned.values())
    failed = [p for p in planned.values() if p.state is State.UNHEALTHY and p.node.registered]
    kept_healthy, reason = [], ""
    if failed and active < policy.panic_threshold * (active + len(failed)):
        kept_healthy = failed
        reason = (
            f"only {active} of {active + len(failed)} nodes pass their checks, below the panic threshold "
            f"of {policy.panic_threshold:.0%}, so those that fail are kept in service"
        )
    if not active:
        requested = intents.drains.keys() | intents.removed.keys()
        accepting = [
            p
            for a, p in planned.items()
            if a not in requested
            and p.state not in (State.ACTIVE, State.JOINING)
            and _may_accept_logins(facts.health.get(a, _UNCHECKED_HEALTH).sql, previous.nodes.get(a), policy)
        ]
        kept_healthy = [*kept_healthy, *accepting]
        if accepting and not reason:
            reason = "no other node is left, so leaving nodes that still accept logins are kept in service"
    kept = (replace(p, eds_health=EdsHealth.HEALTHY, closed_since=None) for p in kept_healthy)
    return planned | {p.node.address: p for p in kept}, reason  # `assign_weights` sets their weights


def _may_accept_logins(probe: CheckResult | None, past: NodePlan | None, policy: Policy) -> bool:
    """Return whether the SQL check passes, or has no result yet for a node that was in service."""
    if probe is None:
        return policy.sql_check and past is not None and past.eds_health is EdsHealth.HEALTHY
    return probe.status is CheckStatus.PASS

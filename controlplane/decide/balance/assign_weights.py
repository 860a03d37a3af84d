"""Assign EDS weights to the nodes of a plan, per group and zone, from session counts. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, resource_factors, water_filling
from controlplane.decide.balance.fair_share import capacity_factor, effective_capacity
from controlplane.decide.balance.water_filling import WeightedNode
from controlplane.decide.inputs import Inputs
from controlplane.model.nodes import EMPTY_MAP, GroupZone, State
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan

# Weights anticipate the sessions that open in this delay until the weights take effect, and in two report
# intervals: a report is up to one interval old when it arrives, and weights are used for another interval.
_WEIGHT_DELAY_SECONDS = 1.0
_REPORT_INTERVALS = 2.0
# Even with longer report intervals, weights are refreshed this often, because other inputs change too.
_MAX_REFRESH_SECONDS = 5.0


def assign_weights(
    planned: Mapping[str, NodePlan], inputs: Inputs
) -> tuple[Mapping[str, NodePlan], frozenset[GroupZone], float]:
    """Return the nodes with weights and factors, the overloaded zones, and when the weights were computed.

    Weights are recomputed once per report interval, at least every 5 s, and at once if nodes enter or leave
    service or their configured weights, groups or zones change. Otherwise the previous weights stay.
    """
    previous, now = inputs.previous, inputs.now
    serving = {a: p for a, p in planned.items() if p.eds_health is EdsHealth.HEALTHY}
    refresh_seconds = min(inputs.policy.report_interval, _MAX_REFRESH_SECONDS)
    if 0 <= now - previous.weights_computed_at < refresh_seconds and _is_same_fleet(serving, previous):
        past = {a: previous.nodes[a] for a in serving}
        group_weights = {a: p.weight for a, p in past.items()}
        zone_weights = {a: p.local_weight for a, p in past.items()}
        serving = _with_factors(serving, {a: p.factors for a, p in past.items() if p.factors})
        return (
            _with_weights({**planned, **serving}, group_weights, zone_weights),
            previous.overloaded_zones,
            previous.weights_computed_at,
        )
    serving = _with_factors(serving, resource_factors.advance_factors(planned, inputs))
    fresh_from = inputs.tidb_counts_stale_before
    sessions = {
        address: session_counts.best_session_count(address, p.endpoint, inputs.facts, fresh_from)
        for address, p in serving.items()
    }
    overloaded_zones = _overloaded_zones(serving, sessions, inputs)
    group_weights, zone_weights = _compute_weights(serving, sessions, inputs)
    return _with_weights({**planned, **serving}, group_weights, zone_weights), overloaded_zones, now


def _is_same_fleet(serving: Mapping[str, NodePlan], previous: Plan) -> bool:
    """Return whether the previous weights were computed for the same nodes, groups and zones."""
    past = previous.nodes
    return sum(p.eds_health is EdsHealth.HEALTHY for p in past.values()) == len(serving) and all(
        (before := past.get(a)) is not None
        and before.weight > 0
        and before.node.weight == p.node.weight
        and (before.group, before.backup, before.zone) == (p.group, p.backup, p.zone)
        for a, p in serving.items()
    )


def _with_factors(
    serving: Mapping[str, NodePlan], factors_by_address: Mapping[str, Mapping[str, Factor]]
) -> dict[str, NodePlan]:
    return {
        a: p if p.factors == (new := factors_by_address.get(a, EMPTY_MAP)) else replace(p, factors=new)
        for a, p in serving.items()
    }


def _with_weights(
    planned: Mapping[str, NodePlan], group_weights: Mapping[str, int], zone_weights: Mapping[str, int]
) -> Mapping[str, NodePlan]:
    return {
        address: p
        if group_weights.get(address, 0) == p.weight and zone_weights.get(address, 0) == p.local_weight
        else replace(p, weight=group_weights.get(address, 0), local_weight=zone_weights.get(address, 0))
        for address, p in planned.items()
    }


def _compute_weights(
    serving: Mapping[str, NodePlan], sessions: Mapping[str, int | None], inputs: Inputs
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weights for Envoys that use all nodes of a group, and for Envoys limited to their zone.

    The weights of backup nodes are relative to each other only.
    """
    previous, facts, policy, now, _ = inputs
    envoy_zones = locality.envoy_zones(facts.envoy_zones, policy)
    groups: dict[tuple[str, bool], list[str]] = {}
    zones: dict[GroupZone, list[str]] = {}
    for address, p in serving.items():
        groups.setdefault((p.group, p.backup), []).append(address)
        if p.zone in envoy_zones and not p.backup:
            zones.setdefault((p.group, p.zone), []).append(address)
    expected_seconds = _WEIGHT_DELAY_SECONDS + _REPORT_INTERVALS * policy.report_interval
    expected = expected_seconds * facts.new_sessions_per_second
    total_weight = sum(p.node.weight for p in serving.values())
    total_opened = sum(facts.new_sessions.values())
    group_weights: dict[str, int] = {}
    zone_weights: dict[str, int] = {}
    for weights, pools, is_local in ((group_weights, groups, False), (zone_weights, zones, True)):
        for members in pools.values():
            nodes = [
                WeightedNode(a, serving[a].node.weight, sessions[a], capacity_factor(serving[a], policy, now))
                for a in members
            ]
            if total_opened:
                opened = sum(facts.new_sessions.get(serving[a].endpoint or "", 0) for a in members)
                expected_arrivals = expected * opened / total_opened
            else:
                expected_arrivals = expected * sum(n.capacity for n in nodes) / total_weight
            ratios = _previous_ratios(members, previous, is_local=is_local)
            weights.update(water_filling.compute_weights(nodes, expected_arrivals, ratios))
    return group_weights, zone_weights


def _previous_ratios(members: list[str], previous: Plan, *, is_local: bool) -> dict[str, float]:
    """Return the previous ratio of each node's weight to its capacity share."""
    past = {a: previous.nodes[a] for a in members if a in previous.nodes}
    weights = {a: (p.local_weight if is_local else p.weight, p.node.weight) for a, p in past.items()}
    return {
        a: water_filling.weight_ratio(weight, capacity) for a, (weight, capacity) in weights.items() if weight
    }


def _overloaded_zones(
    serving: Mapping[str, NodePlan], sessions: Mapping[str, int | None], inputs: Inputs
) -> frozenset[GroupZone]:
    previous, facts, policy, now, _ = inputs
    if not facts.envoy_zones:
        return frozenset()
    active = {a: p for a, p in serving.items() if p.state is State.ACTIVE}
    capacities = {a: effective_capacity(p, policy, now) for a, p in active.items()}
    known_sessions = {a: count for a, count in sessions.items() if a in active and count is not None}
    return locality.overloaded_zones(
        active, known_sessions, capacities, previous.overloaded_zones, policy, facts.envoy_zones
    )

"""The weights of a plan: in each group and zone, by what is known of the sessions there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, resource_factors, water_filling
from controlplane.decide.balance.fair_share import capacity, part
from controlplane.decide.balance.water_filling import Vessel
from controlplane.model.facts import Facts
from controlplane.model.nodes import NOTHING, Quarter, State
from controlplane.model.plan import Advice, Factor, NodePlan, Plan, Policy

# Seconds until weights take effect; beside that, reports are up to one interval old when they arrive, and
# weights stay in force for another.
_UNDER_WAY = 1.0
_INTERVALS = 2.0
# However rare reports are, slow start and vital signs go on, and nodes count their connections themselves.
_LOOK_AFTER = 5.0


def weigh(
    planned: Mapping[str, NodePlan], previous: Plan, facts: Facts, policy: Policy, now: float
) -> tuple[Mapping[str, NodePlan], frozenset[Quarter], float]:
    """The nodes with their weights and factors; which zones are full; as of when.

    Counts change all the time, so they are looked at once in a report interval, or in 5 s; but at once when
    nodes come into service or leave it, or have other weights.
    """
    serving = {a: p for a, p in planned.items() if p.advice is Advice.HEALTHY}
    look_after = min(policy.report_interval, _LOOK_AFTER)
    if 0 <= now - previous.weighed_at < look_after and _same(serving, previous):
        past = {a: previous.nodes[a] for a in serving}
        everywhere = {a: p.weight for a, p in past.items()}
        nearby = {a: p.local_weight for a, p in past.items()}
        serving = _judged(serving, {a: p.factors for a, p in past.items() if p.factors})
        return _with({**planned, **serving}, everywhere, nearby), previous.full, previous.weighed_at
    serving = _judged(serving, resource_factors.advance(planned, previous, facts, policy, now))
    live = _live(serving, facts, policy, now)
    full = _full(serving, live, previous, facts, policy, now)
    everywhere, nearby = _weights(serving, live, previous, facts, policy, now)
    return _with({**planned, **serving}, everywhere, nearby), full, now


def _same(serving: Mapping[str, NodePlan], previous: Plan) -> bool:
    """Whether the weights of before are of the same nodes."""
    past = previous.nodes
    return sum(p.advice is Advice.HEALTHY for p in past.values()) == len(serving) and all(
        (was := past.get(a)) is not None
        and was.weight > 0
        and was.node.weight == p.node.weight
        and (was.group, was.backup, was.zone) == (p.group, p.backup, p.zone)
        for a, p in serving.items()
    )


def _judged(
    serving: Mapping[str, NodePlan], judged: Mapping[str, Mapping[str, Factor]]
) -> dict[str, NodePlan]:
    return {
        a: p if p.factors == (found := judged.get(a, NOTHING)) else replace(p, factors=found)
        for a, p in serving.items()
    }


def _with(
    planned: Mapping[str, NodePlan], everywhere: Mapping[str, int], nearby: Mapping[str, int]
) -> Mapping[str, NodePlan]:
    return {
        address: p
        if everywhere.get(address, 0) == p.weight and nearby.get(address, 0) == p.local_weight
        else replace(p, weight=everywhere.get(address, 0), local_weight=nearby.get(address, 0))
        for address, p in planned.items()
    }


def _weights(
    serving: Mapping[str, NodePlan],
    live: Mapping[str, int | None],
    previous: Plan,
    facts: Facts,
    policy: Policy,
    now: float,
) -> tuple[dict[str, int], dict[str, int]]:
    """For Envoys that use all nodes of a group, and for those that keep to their zone.

    Nodes that stand in are weighed among themselves.
    """
    homes = locality.homes(facts.zones, policy)
    groups: dict[tuple[str, bool], list[str]] = {}
    zones: dict[Quarter, list[str]] = {}
    for address, p in serving.items():
        groups.setdefault((p.group, p.backup), []).append(address)
        if p.zone in homes and not p.backup:
            zones.setdefault((p.group, p.zone), []).append(address)
    expected = (_UNDER_WAY + _INTERVALS * policy.report_interval) * facts.arrivals
    every, opened = sum(p.node.weight for p in serving.values()), sum(facts.opened.values())
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for into, pool, is_local in ((found[0], groups, False), (found[1], zones, True)):
        for members in pool.values():
            vessels = [
                Vessel(a, serving[a].node.weight, live[a], part(serving[a], policy, now)) for a in members
            ]
            if opened:
                arriving = (
                    expected * sum(facts.opened.get(serving[a].endpoint or "", 0) for a in members) / opened
                )
            else:
                arriving = expected * sum(v.capacity for v in vessels) / every
            into.update(
                water_filling.weights(vessels, arriving, _favours(members, previous, is_local=is_local))
            )
    return found


def _favours(members: list[str], previous: Plan, *, is_local: bool) -> dict[str, float]:
    """By how much each node was favoured until now."""
    past = {a: previous.nodes[a] for a in members if a in previous.nodes}
    held = {a: (p.local_weight if is_local else p.weight, p.node.weight) for a, p in past.items()}
    return {a: water_filling.favour(weight, width) for a, (weight, width) in held.items() if weight}


def _live(serving: Mapping[str, NodePlan], facts: Facts, policy: Policy, now: float) -> dict[str, int | None]:
    fresh_from = session_counts.counted_from(policy, now)
    return {
        address: session_counts.total(address, p.endpoint, facts, fresh_from)
        for address, p in serving.items()
    }


def _full(
    serving: Mapping[str, NodePlan],
    live: Mapping[str, int | None],
    previous: Plan,
    facts: Facts,
    policy: Policy,
    now: float,
) -> frozenset[Quarter]:
    if not facts.zones:
        return frozenset()
    active = {a: p for a, p in serving.items() if p.state is State.ACTIVE}
    widths = {a: capacity(p, policy, now) for a, p in active.items()}
    known = {a: count for a, count in live.items() if a in active and count is not None}
    return locality.full(active, known, widths, previous.full, policy, facts.zones)

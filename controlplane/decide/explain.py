"""Why a node has the share of the new sessions that it has: every factor in words, and one sentence. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, metric_levels, resource_factors
from controlplane.decide.balance.balancing_groups import quarters
from controlplane.decide.balance.fair_share import Standing, standings
from controlplane.decide.balance.water_filling import ramp
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import State
from controlplane.model.plan import Advice, Factor, NodePlan, Plan, Policy, Strategy

STATE, LABELS, LOCATION, CONNECTIONS = "state", "labels", "location", "connections"

# The order in which they are taken, as in TiProxy.
_ORDERS = {
    Strategy.RESOURCE: (STATE, LABELS, *resource_factors.NAMES, LOCATION, CONNECTIONS),
    Strategy.LOCATION: (STATE, LABELS, LOCATION, *resource_factors.NAMES, CONNECTIONS),
    Strategy.CONNECTION: (STATE, LABELS, *resource_factors.NAMES, LOCATION, CONNECTIONS),
}
_OFF = "does not count: `balance.policy` is `connection`"
_NOT_KNOWN = "not known"
_CPU_STEP = 0.05  # of all CPU, for which the score rises by one

_NOBODY = Vitals()


@dataclass(frozen=True, slots=True)
class Told:
    """One factor of one node in words."""

    name: str
    score: float | None  # 0 is best; None: not known, or it does not count
    reason: str  # what it is, as a sentence
    share: float | None = None  # what it leaves of the node's share; None: it does not act by shares


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one node has the share that it has."""

    factors: tuple[Told, ...]  # in the order in which they are taken
    weight: int  # that Envoys are told; 0: no new sessions
    share: float  # of the new sessions that come by Envoys that may use the node, from 0 to 1
    sentence: str


def explain(
    plan: Plan, facts: Facts, policy: Policy, now: float, addresses: Iterable[str] | None = None
) -> dict[str, Explanation]:
    """By address; of all nodes when none are named."""
    serving = {a: p for a, p in plan.nodes.items() if p.advice is Advice.HEALTHY}
    taking = locality.taking(serving)
    wanted = [plan.nodes[a] for a in (plan.nodes if addresses is None else addresses)]
    standing = _standings(plan, facts, policy, now)
    fleet = _Fleet(plan, facts, policy, now, taking, standing, _totals(plan, taking))
    return {planned.node.address: _explained(planned, fleet) for planned in wanted}


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What the explanations of all nodes rest on."""

    plan: Plan
    facts: Facts
    policy: Policy
    now: float
    taking: Collection[str]  # nodes that get new sessions
    standings: Mapping[str, Standing]
    totals: Mapping[tuple[str, str | None], int]  # weights by group, and by group and zone


def _standings(plan: Plan, facts: Facts, policy: Policy, now: float) -> dict[str, Standing]:
    served = {a: p for a, p in plan.nodes.items() if p.state is State.ACTIVE}
    _, unasked = session_counts.able(facts, policy, now)
    found: dict[str, Standing] = {}
    for sharers in quarters(served, plan.full, facts.zones, policy, now):
        found |= standings(served, sharers.capacities, unasked, facts, policy, now)
    return found


def _totals(plan: Plan, taking: Collection[str]) -> dict[tuple[str, str | None], int]:
    totals: dict[tuple[str, str | None], int] = {}
    for address in taking:
        p = plan.nodes[address]
        totals[p.group, None] = totals.get((p.group, None), 0) + p.weight
        if p.local_weight:
            totals[p.group, p.zone] = totals.get((p.group, p.zone), 0) + p.local_weight
    return totals


def _explained(planned: NodePlan, fleet: _Fleet) -> Explanation:
    words = {
        STATE: _state(planned, fleet),
        LABELS: _labels(planned, fleet),
        LOCATION: _location(planned, fleet),
        CONNECTIONS: _connections(planned, fleet),
    } | {name: _sign(name, planned, fleet) for name in resource_factors.NAMES}
    share, of = _share(planned, fleet)
    return Explanation(
        factors=tuple(words[name] for name in _ORDERS[fleet.policy.strategy]),
        weight=planned.weight,
        share=share,
        sentence=_sentence(planned, share, of, fleet),
    )


def _share(planned: NodePlan, fleet: _Fleet) -> tuple[float, str]:
    """A node's part of the new sessions, and of which they are, in words."""
    if planned.node.address not in fleet.taking:
        return 0.0, ""
    group = f' of group "{planned.group}"' if planned.group else ""
    if planned.local_weight and (planned.group, planned.zone) not in fleet.plan.full:
        total = fleet.totals[planned.group, planned.zone]
        return planned.local_weight / total, f'{group} that come by Envoys of its zone "{planned.zone}"'
    total = fleet.totals[planned.group, None]
    return (planned.weight / total if total else 0.0), group


def _sentence(planned: NodePlan, share: float, of: str, fleet: _Fleet) -> str:
    if planned.advice is not Advice.HEALTHY:
        return f"gets no new sessions: {planned.reason}"
    if planned.node.address not in fleet.taking:
        return "gets no new sessions: it stands in only when no other node of its group is in service"
    parts = [_holding(planned, fleet)]
    if planned.state is not State.ACTIVE:
        parts.append(fleet.plan.floor or planned.reason)
    since = planned.active_since
    if since is not None and (grown := ramp(fleet.now - since, fleet.policy.slow_start)) < 1:
        parts.append(f"it is in its slow start, at {grown:.0%} of its share")
    parts += [_taken(name, factor) for name, factor in planned.factors.items() if factor.share < 1]
    return f"gets {share:.0%} of the new sessions{of}: {'; '.join(parts)}"


def _taken(name: str, factor: Factor) -> str:
    way = "goes down" if factor.target < factor.share else "goes up" if factor.target > factor.share else ""
    moving = f"{way} to {factor.target:.0%} and is now" if way else "is"
    return f"{_known(name, factor)}, so its share {moving} at {factor.share:.0%}"


def _known(name: str, factor: Factor) -> str:
    shown = "CPU" if name == resource_factors.CPU else name
    if not factor.reason:
        return f"its {shown} is no reason any more to give it less"
    return f"its {shown} is {factor.reason}" if factor.reason == resource_factors.NOT_KNOWN else factor.reason


def _holding(planned: NodePlan, fleet: _Fleet) -> str:
    """Sessions of a node, and how many more or fewer these are than its share."""
    standing = fleet.standings.get(planned.node.address)
    count = _sessions(planned, fleet)
    if count is None:
        return "how many sessions it has is not known"
    if standing is None:
        return f"it has {_sessions_of(count)}"
    count, fair = standing.most, standing.most_share
    if count == fair:
        return f"it has {_sessions_of(count)}, which is its share"
    return f"it has {_sessions_of(count)}, {abs(count - fair)} {_than(count, fair)} than its share of {fair}"


def _than(count: int, fair: int) -> str:
    return "more" if count > fair else "fewer"


def _sessions_of(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _sessions(planned: NodePlan, fleet: _Fleet) -> int | None:
    fresh_from = session_counts.counted_from(fleet.policy, fleet.now)
    return session_counts.total(planned.node.address, planned.endpoint, fleet.facts, fresh_from)


# --- each factor --------------------------------------------------------------------------------------------


def _state(planned: NodePlan, fleet: _Fleet) -> Told:
    serves = planned.advice is Advice.HEALTHY
    kept = f"; {fleet.plan.floor}" if serves and planned.state is not State.ACTIVE else ""
    return Told(STATE, 0 if serves else 1, f"{planned.state}: {planned.reason}{kept}")


def _labels(planned: NodePlan, fleet: _Fleet) -> Told:
    group = f'in group "{planned.group}"' if planned.group else "in no group"
    if not planned.backup:
        return Told(LABELS, 0, group)
    if planned.node.address in fleet.taking:
        return Told(LABELS, 0, f"{group}; it stands in, since no other node of its group is in service")
    return Told(LABELS, 1, f"{group}; it stands in only when no other node of its group is in service")


def _location(planned: NodePlan, fleet: _Fleet) -> Told:
    if fleet.policy.strategy is Strategy.CONNECTION:
        return Told(LOCATION, None, _OFF)
    if not planned.zone:
        return Told(LOCATION, None, f"{_NOT_KNOWN}: it has no label `{fleet.policy.zone_label}`")
    homes = [zone for zone in fleet.facts.zones.values() if zone]
    if not homes:
        return Told(LOCATION, None, f'in zone "{planned.zone}"; no Envoy says where it is')
    here = homes.count(planned.zone)
    full = "; the zone is full, so its Envoys use nodes elsewhere, too"
    is_full = (planned.group, planned.zone) in fleet.plan.full
    reason = f'in zone "{planned.zone}", as {here} of {len(homes)} Envoys that say where they are'
    return Told(LOCATION, 0 if here else 1, reason + (full if is_full else ""))


def _connections(planned: NodePlan, fleet: _Fleet) -> Told:
    return Told(CONNECTIONS, _sessions(planned, fleet), _holding(planned, fleet))


def _sign(name: str, planned: NodePlan, fleet: _Fleet) -> Told:
    if fleet.policy.strategy is Strategy.CONNECTION:
        return Told(name, None, _OFF)
    vitals = fleet.facts.vitals.get(planned.node.address, _NOBODY)
    score, words = _SIGNS[name](vitals, fleet.now)
    factor = planned.factors.get(name)
    if factor is None:
        return Told(name, score, words or _why_unknown(fleet.facts), None if score is None else 1.0)
    if name != resource_factors.CPU and score is not None:
        score = factor.level  # it may still be what it was
    reason = _taken(name, factor) if factor.share < 1 else factor.reason
    return Told(name, score, reason, factor.share)


def _why_unknown(facts: Facts) -> str:
    return f"{_NOT_KNOWN}: {facts.vitals_outage}" if facts.vitals_outage else _NOT_KNOWN


def _health(vitals: Vitals, now: float) -> tuple[float | None, str]:
    return metric_levels.health(vitals, 0, now), metric_levels.failures(vitals, now)


def _memory(vitals: Vitals, now: float) -> tuple[float | None, str]:
    return metric_levels.memory(vitals, 0, now), metric_levels.filling(vitals, now)


def _cpu(vitals: Vitals, now: float) -> tuple[float | None, str]:
    used = metric_levels.cpu(vitals, now)
    if used is None:
        return None, ""
    cores = f" of {vitals.cpu_quota:g} cores" if vitals.cpu_quota is not None else ""
    return float(round(used / _CPU_STEP)), f"{used:.0%}{cores} in use"


_SIGNS = {resource_factors.HEALTH: _health, resource_factors.MEMORY: _memory, resource_factors.CPU: _cpu}

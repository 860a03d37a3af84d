"""Explain a node's share of the new sessions: every factor, and a summary in one sentence. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, metric_levels, resource_factors
from controlplane.decide.balance.balancing_groups import balancing_groups
from controlplane.decide.balance.fair_share import LoadStatus, load_statuses
from controlplane.decide.balance.water_filling import ramp
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import State
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

STATE, LABELS, LOCATION, CONNECTIONS = "state", "labels", "location", "connections"

# The order in which the factors apply, as in TiProxy.
_FACTOR_ORDER = {
    BalancePolicy.RESOURCE: (STATE, LABELS, *resource_factors.NAMES, LOCATION, CONNECTIONS),
    BalancePolicy.LOCATION: (STATE, LABELS, LOCATION, *resource_factors.NAMES, CONNECTIONS),
    BalancePolicy.CONNECTION: (STATE, LABELS, *resource_factors.NAMES, LOCATION, CONNECTIONS),
}
_FACTOR_DISABLED = "not used: `balance.policy` is `connection`"
_NOT_KNOWN = "not known"
_CPU_SCORE_STEP = 0.05  # CPU usage per point of the score

_UNKNOWN_METRICS = NodeMetrics()


@dataclass(frozen=True, slots=True)
class FactorExplanation:
    """The explanation of one factor of one node."""

    name: str
    score: float | None  # 0 is best; None: not known or not used
    reason: str  # the current value, as a sentence
    share: float | None = None  # multiplier of the node's share; None: it does not scale the share


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    """The explanation of one node's share."""

    factors: tuple[FactorExplanation, ...]  # in the order in which they apply
    weight: int  # weight in EDS; 0: no new sessions
    share: float  # part of the new sessions of the Envoys that may use the node, 0 to 1
    sentence: str


def explain(
    plan: Plan, facts: Facts, policy: Policy, now: float, addresses: Iterable[str] | None = None
) -> dict[str, NodeExplanation]:
    """Return the explanations by address, for `addresses` or all nodes."""
    serving = {a: p for a, p in plan.nodes.items() if p.eds_health is EdsHealth.HEALTHY}
    serving_addresses = locality.serving_addresses(serving)
    wanted = [plan.nodes[a] for a in (plan.nodes if addresses is None else addresses)]
    statuses = _load_statuses(plan, facts, policy, now)
    context = _ExplanationContext(
        plan, facts, policy, now, serving_addresses, statuses, _weight_totals(plan, serving_addresses)
    )
    return {planned.node.address: _explain_node(planned, context) for planned in wanted}


@dataclass(frozen=True, slots=True)
class _ExplanationContext:
    """The inputs shared by the explanations of all nodes."""

    plan: Plan
    facts: Facts
    policy: Policy
    now: float
    serving: Collection[str]  # nodes that receive new sessions
    load_statuses: Mapping[str, LoadStatus]
    weight_totals: Mapping[
        tuple[str, str | None], int
    ]  # sum of weights per group (zone None), and per group and zone


def _load_statuses(plan: Plan, facts: Facts, policy: Policy, now: float) -> dict[str, LoadStatus]:
    served = {a: p for a, p in plan.nodes.items() if p.state is State.ACTIVE}
    _, incapable = session_counts.migration_capable(facts, policy, now)
    statuses: dict[str, LoadStatus] = {}
    for balancing_group in balancing_groups(served, plan.overloaded_zones, facts.envoy_zones, policy, now):
        statuses |= load_statuses(served, balancing_group.capacities, incapable, facts, policy, now)
    return statuses


def _weight_totals(plan: Plan, serving: Collection[str]) -> dict[tuple[str, str | None], int]:
    totals: dict[tuple[str, str | None], int] = {}
    for address in serving:
        p = plan.nodes[address]
        totals[p.group, None] = totals.get((p.group, None), 0) + p.weight
        if p.local_weight:
            totals[p.group, p.zone] = totals.get((p.group, p.zone), 0) + p.local_weight
    return totals


def _explain_node(planned: NodePlan, context: _ExplanationContext) -> NodeExplanation:
    details = {
        STATE: _explain_state(planned, context),
        LABELS: _explain_labels(planned, context),
        LOCATION: _explain_location(planned, context),
        CONNECTIONS: _explain_connections(planned, context),
    } | {name: _explain_metric(name, planned, context) for name in resource_factors.NAMES}
    share, share_scope = _share_of_new_sessions(planned, context)
    return NodeExplanation(
        factors=tuple(details[name] for name in _FACTOR_ORDER[context.policy.balance_policy]),
        weight=planned.weight,
        share=share,
        sentence=_summarize(planned, share, share_scope, context),
    )


def _share_of_new_sessions(planned: NodePlan, context: _ExplanationContext) -> tuple[float, str]:
    """Return a node's share of the new sessions, and a phrase that says which sessions these are."""
    if planned.node.address not in context.serving:
        return 0.0, ""
    group = f' of group "{planned.group}"' if planned.group else ""
    if planned.local_weight and (planned.group, planned.zone) not in context.plan.overloaded_zones:
        total = context.weight_totals[planned.group, planned.zone]
        return planned.local_weight / total, f'{group} through Envoys of its zone "{planned.zone}"'
    total = context.weight_totals[planned.group, None]
    return (planned.weight / total if total else 0.0), group


def _summarize(planned: NodePlan, share: float, share_scope: str, context: _ExplanationContext) -> str:
    if planned.eds_health is not EdsHealth.HEALTHY:
        return f"gets no new sessions: {planned.reason}"
    if planned.node.address not in context.serving:
        return "gets no new sessions: it is a backup, used only when no other node of its group is in service"
    parts = [_describe_sessions(planned, context)]
    if planned.state is not State.ACTIVE:
        parts.append(context.plan.panic_threshold_reason or planned.reason)
    since = planned.active_since
    if since is not None and (ramped := ramp(context.now - since, context.policy.slow_start)) < 1:
        parts.append(f"it is in its slow start, at {ramped:.0%} of its share")
    parts += [_describe_factor(name, factor) for name, factor in planned.factors.items() if factor.share < 1]
    return f"gets {share:.0%} of the new sessions{share_scope}: {'; '.join(parts)}"


def _describe_factor(name: str, factor: Factor) -> str:
    trend = "goes down" if factor.target < factor.share else "goes up" if factor.target > factor.share else ""
    change = f"{trend} to {factor.target:.0%} and is now" if trend else "is"
    return f"{_describe_cause(name, factor)}, so its share {change} at {factor.share:.0%}"


def _describe_cause(name: str, factor: Factor) -> str:
    label = "CPU" if name == resource_factors.CPU else name
    if not factor.reason:
        return f"its {label} no longer reduces its share"
    return f"its {label} is {factor.reason}" if factor.reason == resource_factors.NOT_KNOWN else factor.reason


def _describe_sessions(planned: NodePlan, context: _ExplanationContext) -> str:
    """Describe how many sessions a node has, and how many more or fewer than its share."""
    status = context.load_statuses.get(planned.node.address)
    count = _session_count(planned, context)
    if count is None:
        return "its session count is not known"
    if status is None:
        return f"it has {_pluralize_sessions(count)}"
    count, share = status.max_sessions, status.max_share
    if count == share:
        return f"it has {_pluralize_sessions(count)}, which is its share"
    comparison = f"{abs(count - share)} {'more' if count > share else 'fewer'}"
    return f"it has {_pluralize_sessions(count)}, {comparison} than its share of {share}"


def _pluralize_sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _session_count(planned: NodePlan, context: _ExplanationContext) -> int | None:
    fresh_from = session_counts.tidb_count_stale_before(context.policy, context.now)
    return session_counts.best_session_count(
        planned.node.address, planned.endpoint, context.facts, fresh_from
    )


# --- each factor --------------------------------------------------------------------------------------------


def _explain_state(planned: NodePlan, context: _ExplanationContext) -> FactorExplanation:
    serves = planned.eds_health is EdsHealth.HEALTHY
    override_note = (
        f"; {context.plan.panic_threshold_reason}" if serves and planned.state is not State.ACTIVE else ""
    )
    return FactorExplanation(STATE, 0 if serves else 1, f"{planned.state}: {planned.reason}{override_note}")


def _explain_labels(planned: NodePlan, context: _ExplanationContext) -> FactorExplanation:
    group = f'in group "{planned.group}"' if planned.group else "in no group"
    if not planned.backup:
        return FactorExplanation(LABELS, 0, group)
    if planned.node.address in context.serving:
        return FactorExplanation(
            LABELS, 0, f"{group}; it is a backup, in use because no other node of its group is in service"
        )
    return FactorExplanation(
        LABELS, 1, f"{group}; it is a backup, used only when no other node of its group is in service"
    )


def _explain_location(planned: NodePlan, context: _ExplanationContext) -> FactorExplanation:
    if context.policy.balance_policy is BalancePolicy.CONNECTION:
        return FactorExplanation(LOCATION, None, _FACTOR_DISABLED)
    if not planned.zone:
        return FactorExplanation(
            LOCATION, None, f"{_NOT_KNOWN}: it has no label `{context.policy.zone_label}`"
        )
    envoy_zones = [zone for zone in context.facts.envoy_zones.values() if zone]
    if not envoy_zones:
        return FactorExplanation(LOCATION, None, f'in zone "{planned.zone}"; no Envoy reports its zone')
    local_envoys = envoy_zones.count(planned.zone)
    overload_note = "; the zone is overloaded, so its Envoys also use nodes in other zones"
    is_overloaded = (planned.group, planned.zone) in context.plan.overloaded_zones
    reason = f'in zone "{planned.zone}", like {local_envoys} of {len(envoy_zones)} Envoys that report a zone'
    return FactorExplanation(
        LOCATION, 0 if local_envoys else 1, reason + (overload_note if is_overloaded else "")
    )


def _explain_connections(planned: NodePlan, context: _ExplanationContext) -> FactorExplanation:
    return FactorExplanation(
        CONNECTIONS, _session_count(planned, context), _describe_sessions(planned, context)
    )


def _explain_metric(name: str, planned: NodePlan, context: _ExplanationContext) -> FactorExplanation:
    if context.policy.balance_policy is BalancePolicy.CONNECTION:
        return FactorExplanation(name, None, _FACTOR_DISABLED)
    metrics = context.facts.node_metrics.get(planned.node.address, _UNKNOWN_METRICS)
    score, description = _METRIC_SCORES[name](metrics, context.now)
    factor = planned.factors.get(name)
    if factor is None:
        return FactorExplanation(
            name, score, description or _why_unknown(context.facts), None if score is None else 1.0
        )
    if name != resource_factors.CPU and score is not None:
        score = factor.level  # hysteresis may keep the previous level
    reason = _describe_factor(name, factor) if factor.share < 1 else factor.reason
    return FactorExplanation(name, score, reason, factor.share)


def _why_unknown(facts: Facts) -> str:
    return f"{_NOT_KNOWN}: {facts.node_metrics_outage}" if facts.node_metrics_outage else _NOT_KNOWN


def _health_score(metrics: NodeMetrics, now: float) -> tuple[float | None, str]:
    return metric_levels.health_level(metrics, 0, now), metric_levels.failure_summary(metrics, now)


def _memory_score(metrics: NodeMetrics, now: float) -> tuple[float | None, str]:
    return metric_levels.memory_level(metrics, 0, now), metric_levels.memory_summary(metrics, now)


def _cpu_score(metrics: NodeMetrics, now: float) -> tuple[float | None, str]:
    usage = metric_levels.cpu_usage(metrics, now)
    if usage is None:
        return None, ""
    cores = f" of {metrics.cpu_quota:g} cores" if metrics.cpu_quota is not None else ""
    return float(round(usage / _CPU_SCORE_STEP)), f"{usage:.0%}{cores} in use"


_METRIC_SCORES = {
    resource_factors.HEALTH: _health_score,
    resource_factors.MEMORY: _memory_score,
    resource_factors.CPU: _cpu_score,
}

"""Explain which share of the new sessions each node gets, and why. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, metric_levels, resource_factors
from controlplane.decide.balance.fair_share import LoadStatus, balancing_groups, load_statuses
from controlplane.decide.balance.resource_factors import NOT_KNOWN
from controlplane.decide.balance.water_filling import ramp
from controlplane.decide.inputs import Inputs
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import State
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

STATE, LABELS, LOCATION, CONNECTIONS = "state", "labels", "location", "connections"

# The order in which the factors apply, as in TiProxy.
_FACTOR_ORDER = (STATE, LABELS, *resource_factors.NAMES, LOCATION, CONNECTIONS)
_LOCATION_FIRST_ORDER = (STATE, LABELS, LOCATION, *resource_factors.NAMES, CONNECTIONS)
_FACTOR_DISABLED = "not used: `balance.policy` is `connection`"
_UNUSED_BACKUP = "it is a backup, used only when no other node of its group is in service"
_CPU_SCORE_STEP = 0.05  # CPU usage per point of the score

_UNKNOWN_METRICS = NodeMetrics()


@dataclass(frozen=True, slots=True)
class FactorExplanation:
    name: str
    score: float | None  # 0 is best; None: the metric is unknown, or the factor is not used
    reason: str  # describes the current value
    share: float | None = None  # multiplier of the node's share; None: the factor multiplies nothing


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    factors: tuple[FactorExplanation, ...]  # in the order in which they apply
    weight: int  # weight in EDS; 0: no new sessions
    share: float  # of the new sessions on the Envoys that may use the node; 0 to 1
    sentence: str


def explain(
    plan: Plan, facts: Facts, policy: Policy, now: float, addresses: Iterable[str] | None = None
) -> dict[str, NodeExplanation]:
    """Return the explanations by address, for `addresses` or, if it is None, for all nodes."""
    explainer = _Explainer(Inputs(plan, facts, policy, now, plan.switch_overrides))
    return {a: explainer.explain(plan.nodes[a]) for a in (plan.nodes if addresses is None else addresses)}


class _Explainer:
    def __init__(self, inputs: Inputs) -> None:
        plan, self._facts, self._policy, self._now, _ = inputs
        self._plan = plan
        self._serving = locality.serving_addresses(
            {a: p for a, p in plan.nodes.items() if p.eds_health is EdsHealth.HEALTHY}
        )
        self._counts_fresh_from = inputs.tidb_counts_stale_before
        self._load_statuses = _load_statuses(inputs)
        # Sums of the EDS weights by (group, zone). With zone None, the sum is over all zones of the group.
        self._weight_totals: dict[tuple[str, str | None], int] = {}
        totals = self._weight_totals
        for p in map(plan.nodes.__getitem__, self._serving):
            totals[p.group, None] = totals.get((p.group, None), 0) + p.weight
            if p.local_weight:
                totals[p.group, p.zone] = totals.get((p.group, p.zone), 0) + p.local_weight

    def explain(self, planned: NodePlan) -> NodeExplanation:
        """Explain the share of one node."""
        factors = [
            self._explain_state(planned),
            self._explain_labels(planned),
            self._explain_location(planned),
            FactorExplanation(CONNECTIONS, self._session_count(planned), self._describe_sessions(planned)),
            *(self._explain_metric(name, planned) for name in resource_factors.NAMES),
        ]
        is_location_first = self._policy.balance_policy is BalancePolicy.LOCATION
        order = _LOCATION_FIRST_ORDER if is_location_first else _FACTOR_ORDER
        share, share_scope = self._share_of_new_sessions(planned)
        return NodeExplanation(
            factors=tuple(sorted(factors, key=lambda factor: order.index(factor.name))),
            weight=planned.weight,
            share=share,
            sentence=self._summarize(planned, share, share_scope),
        )

    def _share_of_new_sessions(self, planned: NodePlan) -> tuple[float, str]:
        """Return a node's share of the new sessions of its group or zone, and a phrase for this scope."""
        if planned.node.address not in self._serving:
            return 0.0, ""
        group = f' of group "{planned.group}"' if planned.group else ""
        if planned.local_weight and (planned.group, planned.zone) not in self._plan.overloaded_zones:
            total = self._weight_totals[planned.group, planned.zone]
            return planned.local_weight / total, f'{group} through Envoys of its zone "{planned.zone}"'
        total = self._weight_totals[planned.group, None]
        return (planned.weight / total if total else 0.0), group

    def _summarize(self, planned: NodePlan, share: float, share_scope: str) -> str:
        if planned.eds_health is not EdsHealth.HEALTHY:
            return f"gets no new sessions: {planned.reason}"
        if planned.node.address not in self._serving:
            return f"gets no new sessions: {_UNUSED_BACKUP}"
        parts = [self._describe_sessions(planned)]
        if planned.state is not State.ACTIVE:
            parts.append(self._plan.panic_threshold_reason or planned.reason)
        since = planned.active_since
        if since is not None and (ramped := ramp(self._now - since, self._policy.slow_start)) < 1:
            parts.append(f"it is in its slow start, at {ramped:.0%} of its share")
        parts += [
            _describe_factor(name, factor) for name, factor in planned.factors.items() if factor.share < 1
        ]
        return f"gets {share:.0%} of the new sessions{share_scope}: {'; '.join(parts)}"

    def _describe_sessions(self, planned: NodePlan) -> str:
        """Describe how many sessions a node has, and by how many this differs from its share."""
        status, count = self._load_statuses.get(planned.node.address), self._session_count(planned)
        if count is None:
            return "its session count is not known"
        if status is not None:
            count = status.max_sessions
        text = "it has 1 session" if count == 1 else f"it has {count} sessions"
        if status is None:
            return text
        if count == status.max_share:
            return f"{text}, which is its share"
        comparison = "more" if count > status.max_share else "fewer"
        return f"{text}, {abs(count - status.max_share)} {comparison} than its share of {status.max_share}"

    def _session_count(self, planned: NodePlan) -> int | None:
        return session_counts.best_session_count(
            planned.node.address, planned.endpoint, self._facts, self._counts_fresh_from
        )

    def _explain_state(self, planned: NodePlan) -> FactorExplanation:
        reason = f"{planned.state}: {planned.reason}"
        if planned.eds_health is not EdsHealth.HEALTHY:
            return FactorExplanation(STATE, 1, reason)
        panic_note = "" if planned.state is State.ACTIVE else f"; {self._plan.panic_threshold_reason}"
        return FactorExplanation(STATE, 0, reason + panic_note)

    def _explain_labels(self, planned: NodePlan) -> FactorExplanation:
        group = f'in group "{planned.group}"' if planned.group else "in no group"
        if not planned.backup:
            return FactorExplanation(LABELS, 0, group)
        if planned.node.address not in self._serving:
            return FactorExplanation(LABELS, 1, f"{group}; {_UNUSED_BACKUP}")
        note = "it is a backup, in use because no other node of its group is in service"
        return FactorExplanation(LABELS, 0, f"{group}; {note}")

    def _explain_location(self, planned: NodePlan) -> FactorExplanation:
        if self._policy.balance_policy is BalancePolicy.CONNECTION:
            return FactorExplanation(LOCATION, None, _FACTOR_DISABLED)
        if not planned.zone:
            reason = f"{NOT_KNOWN}: it has no label `{self._policy.zone_label}`"
            return FactorExplanation(LOCATION, None, reason)
        reason = f'in zone "{planned.zone}"'
        envoy_zones = [zone for zone in self._facts.envoy_zones.values() if zone]
        if not envoy_zones:
            return FactorExplanation(LOCATION, None, f"{reason}; no Envoy reports its zone")
        local_envoys = envoy_zones.count(planned.zone)
        reason += f", like {local_envoys} of {len(envoy_zones)} Envoys that report a zone"
        if (planned.group, planned.zone) in self._plan.overloaded_zones:
            reason += "; the zone is overloaded, so its Envoys also use nodes in other zones"
        return FactorExplanation(LOCATION, 0 if local_envoys else 1, reason)

    def _explain_metric(self, name: str, planned: NodePlan) -> FactorExplanation:
        if self._policy.balance_policy is BalancePolicy.CONNECTION:
            return FactorExplanation(name, None, _FACTOR_DISABLED)
        metrics = self._facts.node_metrics.get(planned.node.address, _UNKNOWN_METRICS)
        score, description = _metric_score(name, metrics, self._now)
        factor = planned.factors.get(name)
        if factor is None:
            outage = self._facts.node_metrics_outage
            unknown = f"{NOT_KNOWN}: {outage}" if outage else NOT_KNOWN
            return FactorExplanation(name, score, description or unknown, None if score is None else 1.0)
        if name != resource_factors.CPU and score is not None:
            score = factor.level  # differs from the score if hysteresis keeps the previous level
        reason = _describe_factor(name, factor) if factor.share < 1 else factor.reason
        return FactorExplanation(name, score, reason, factor.share)


def _load_statuses(inputs: Inputs) -> dict[str, LoadStatus]:
    plan, facts, policy, now, _ = inputs
    served = {a: p for a, p in plan.nodes.items() if p.state is State.ACTIVE}
    _, incapable = session_counts.migration_capable(inputs)
    statuses: dict[str, LoadStatus] = {}
    for balancing_group in balancing_groups(served, plan.overloaded_zones, facts.envoy_zones, policy, now):
        statuses |= load_statuses(served, balancing_group.capacities, incapable, inputs)
    return statuses


def _describe_factor(name: str, factor: Factor) -> str:
    label = "CPU" if name == resource_factors.CPU else name
    if not factor.reason:
        cause = f"its {label} no longer reduces its share"
    else:
        is_unknown = factor.reason == NOT_KNOWN
        cause = f"its {label} is {factor.reason}" if is_unknown else factor.reason
    trend = "goes down" if factor.target < factor.share else "goes up" if factor.target > factor.share else ""
    change = f"{trend} to {factor.target:.0%} and is now" if trend else "is"
    return f"{cause}, so its share {change} at {factor.share:.0%}"


def _metric_score(name: str, metrics: NodeMetrics, now: float) -> tuple[float | None, str]:
    """Return the score and the description of a metric's current value."""
    if name == resource_factors.HEALTH:
        return metric_levels.health_level(metrics, 0, now), metric_levels.failure_summary(metrics, now)
    if name == resource_factors.MEMORY:
        return metric_levels.memory_level(metrics, 0, now), metric_levels.memory_summary(metrics, now)
    usage = metric_levels.cpu_usage(metrics, now)
    if usage is None:
        return None, ""
    cores = f" of {metrics.cpu_quota:g} cores" if metrics.cpu_quota is not None else ""
    return float(round(usage / _CPU_SCORE_STEP)), f"{usage:.0%}{cores} in use"

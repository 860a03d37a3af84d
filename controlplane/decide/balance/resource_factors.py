"""Scale nodes' shares of the sessions by their health, memory and CPU. No I/O.

Each factor of a node multiplies its share by a value from `MIN_SHARE` to 1. It approaches its target at a
limited rate, so that a wrong or late metric does not cause a rush of sessions. The factors apply in order,
and each compares a node only with the others of its group: a problem that most of them have says nothing
about the node. An unknown metric is neither good nor bad, so a share that it reduced recovers slowly
(docs/internals/decisions/0010-shares-instead-of-scores.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.balance import metric_levels
from controlplane.decide.balance.locality import serving_by_group
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan, Plan, Policy

# In the order in which they apply.
HEALTH, MEMORY, CPU = NAMES = ("health", "memory", "cpu")

# Lower limit: a node without any sessions could not show that it has recovered.
MIN_SHARE = 0.02
# The target at memory level 1: memory is short, but not critical.
REDUCED_SHARE = 0.5
# Of a full share, per second.
SLOW_SHARE_PER_SECOND, FAST_SHARE_PER_SECOND = 1 / 60, 1 / 10
# Upper limit of the elapsed time per step, for gaps between decisions (a pause, a clock that was set).
_MAX_STEP_SECONDS = 10.0

# CPU: nodes are compared by their headroom up to this ceiling, so that differences between busy nodes count
# for more than those between idle ones.
_CPU_HEADROOM_CEILING = 1.3
_MAX_CPU_USED = 1.2
# A share shrinks when the others have this many times its headroom, and recovers below the second ratio.
_SHRINK_RATIO, _RECOVER_RATIO = 1.2, 1.1
# Seconds in which a share would reach its target. A CPU value covers the last 30 s, and sessions take time to
# migrate: a faster rate would make shares oscillate.
_CPU_ADJUST_SECONDS = 60.0

NOT_KNOWN = "not known"
_COMMON_TO_GROUP_NOTE = "; most nodes of its group are no better, so it keeps its share"


@dataclass(frozen=True, slots=True)
class _FactorTarget:
    """The target of a factor, and the reason."""

    share: float
    level: int
    reason: str
    share_per_second: float = SLOW_SHARE_PER_SECOND  # of a full share, per second


_NO_REDUCTION = _FactorTarget(1.0, 0, "")
_METRIC_UNKNOWN = _FactorTarget(1.0, 0, NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Nodes in service that share the same sessions, with their metrics."""

    capacities: Mapping[str, int]
    cpu_usage: Mapping[str, float]  # nodes with a known CPU usage whose slow start is over
    suspect: Mapping[str, NodeMetrics]  # nodes whose health or memory may not be normal
    unmeasured: Collection[str]  # nodes without any metrics
    previous_factors: Mapping[str, Mapping[str, Factor]]
    now: float

    def previous(self, name: str) -> dict[str, Factor]:
        """Return the previous value of one factor, for the nodes that had it."""
        return {
            address: factors[name] for address, factors in self.previous_factors.items() if name in factors
        }

    def total_capacity(self, addresses: Collection[str]) -> int:
        """Return the total capacity of some of the nodes."""
        return sum(self.capacities[address] for address in addresses)


def combined_share(factors: Mapping[str, Factor]) -> float:
    """Return the product of all factors of a node."""
    product = 1.0
    for factor in factors.values():
        product *= factor.share
    return product


def advance_factors(
    planned: Mapping[str, NodePlan], previous: Plan, facts: Facts, policy: Policy, now: float
) -> dict[str, Mapping[str, Factor]]:
    """Return the factors other than 1 of the nodes in service, by address and then by name.

    `previous` holds their values as of its `weights_computed_at`. The CPU of a node is not compared during
    its slow start, when it has fewer sessions by design.
    """
    if policy.balance_policy is BalancePolicy.CONNECTION:
        return {}
    before = {a: p.factors for a, p in previous.nodes.items() if p.factors}
    if not facts.node_metrics and not before:
        return {}
    elapsed = min(max(now - previous.weights_computed_at, 0.0), _MAX_STEP_SECONDS)
    served = {a: p for a, p in planned.items() if p.eds_health is EdsHealth.HEALTHY}
    advanced: dict[str, Mapping[str, Factor]] = {}
    for addresses in serving_by_group(served).values():
        pool = _build_pool(addresses, served, before, facts, now - policy.slow_start, now)
        targets = _targets(pool)
        for address in dict.fromkeys([a for name in NAMES for a in targets[name]]):
            target_by_name = {name: targets[name][address] for name in NAMES if address in targets[name]}
            old_factors = pool.previous_factors.get(address, EMPTY_MAP)
            stepped = {
                name: _step_factor(old_factors.get(name), target, elapsed)
                for name, target in target_by_name.items()
            }
            reduced = {name: factor for name, factor in stepped.items() if factor.share < 1 or factor.level}
            if reduced:
                advanced[address] = MappingProxyType(reduced)
    return advanced


def _build_pool(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    previous_factors: Mapping[str, Mapping[str, Factor]],
    facts: Facts,
    active_before: float,
    now: float,
) -> _Pool:
    """Build the pool. Nodes that came into service after `active_before` are in their slow start."""
    cpu_usage, suspect, unmeasured = {}, {}, []
    oldest = now - metric_levels.CPU_MAX_AGE_SECONDS
    for address in addresses:
        metrics = facts.node_metrics.get(address)
        if metrics is None:
            unmeasured.append(address)
            continue
        if not metric_levels.is_normal(metrics, now):
            suspect[address] = metrics
        cpu = metrics.cpu
        if cpu is not None and cpu.at >= oldest:
            since = served[address].active_since
            if since is None or since <= active_before:
                cpu_usage[address] = min(max(cpu.value, 0.0), _MAX_CPU_USED)
    return _Pool(
        capacities={a: served[a].node.weight for a in addresses},
        cpu_usage=cpu_usage,
        suspect=suspect,
        unmeasured=unmeasured,
        previous_factors={a: previous_factors[a] for a in addresses if a in previous_factors}
        if previous_factors
        else EMPTY_MAP,
        now=now,
    )


def _step_factor(previous: Factor | None, target: _FactorTarget, elapsed: float) -> Factor:
    current = 1.0 if previous is None else previous.share
    step = target.share_per_second * elapsed
    reached = (
        max(target.share, current - step) if target.share < current else min(target.share, current + step)
    )
    return Factor(reached, target.share, target.level, target.reason)


def _targets(pool: _Pool) -> dict[str, dict[str, _FactorTarget]]:
    """Return the targets by factor and then by address, without nodes whose factor is 1 and stays so."""
    health = _health_targets(pool)
    avoided = {a for a, target in health.items() if target.share < 1}
    memory = _memory_targets(pool, avoided)
    avoided |= {a for a, target in memory.items() if target.share < 1}
    return {HEALTH: health, MEMORY: memory, CPU: _cpu_targets(pool, avoided)}


# --- health and memory: levels -----------------------------------------------------------------------------


def _evaluate_levels(
    name: str, level_of: Callable[[NodeMetrics, int, float], int | None], pool: _Pool
) -> tuple[dict[str, int], int, dict[str, _FactorTarget]]:
    """Return levels above 0, the capacity of nodes with a known level, and targets of nodes with a factor."""
    previous = pool.previous(name)
    levels: dict[str, int] = {}
    unknown = set(pool.unmeasured)
    for address, metrics in pool.suspect.items():
        level = level_of(metrics, previous[address].level if address in previous else 0, pool.now)
        if level:
            levels[address] = level
        elif level is None:
            unknown.add(address)
    known = pool.total_capacity(pool.capacities) - pool.total_capacity(unknown)
    return levels, known, {a: _METRIC_UNKNOWN if a in unknown else _NO_REDUCTION for a in previous}


def _health_targets(pool: _Pool) -> dict[str, _FactorTarget]:
    levels, known, targets = _evaluate_levels(HEALTH, metric_levels.health_level, pool)
    is_common = 2 * pool.total_capacity(levels) > known
    for address, level in levels.items():
        reason = metric_levels.failure_reason(pool.suspect[address], pool.now)
        targets[address] = (
            _FactorTarget(1.0, level, reason + _COMMON_TO_GROUP_NOTE)
            if is_common
            else _FactorTarget(MIN_SHARE, level, reason)
        )
    return targets


def _memory_targets(pool: _Pool, avoided: Collection[str]) -> dict[str, _FactorTarget]:
    """Return targets as for health, but reduce at most half of the capacity, including `avoided` nodes."""
    levels, known, targets = _evaluate_levels(MEMORY, metric_levels.memory_level, pool)
    total = pool.total_capacity(pool.capacities)
    reducing_levels = set()
    for min_level in (1, 2):
        short = {a for a, level in levels.items() if level >= min_level}
        if 2 * pool.total_capacity(short) <= known and 2 * pool.total_capacity(short | set(avoided)) <= total:
            reducing_levels.add(min_level)
    for address, level in levels.items():
        reason = metric_levels.memory_summary(pool.suspect[address], pool.now)
        if level == 2 and 2 in reducing_levels:
            is_urgent = metric_levels.is_memory_urgent(pool.suspect[address], pool.now)
            targets[address] = _FactorTarget(
                MIN_SHARE, level, reason, FAST_SHARE_PER_SECOND if is_urgent else SLOW_SHARE_PER_SECOND
            )
        elif 1 in reducing_levels:
            targets[address] = _FactorTarget(REDUCED_SHARE, level, reason)
        else:
            targets[address] = _FactorTarget(1.0, level, reason + _COMMON_TO_GROUP_NOTE)
    return targets


# --- CPU: compared ------------------------------------------------------------------------------------------


def _cpu_targets(pool: _Pool, avoided: Collection[str]) -> dict[str, _FactorTarget]:
    """Reduce the share of a node that is much busier than the others, until it no longer is.

    All CPU usage counts, whatever causes it: a node that stays busy with fewer sessions gets still fewer.
    Between the two bounds shares do not change.
    """
    previous = pool.previous(CPU)
    usage = pool.cpu_usage
    targets = dict.fromkeys(previous.keys() - usage.keys(), _METRIC_UNKNOWN)
    compared = {a: value for a, value in usage.items() if a not in avoided} if avoided else usage
    if not compared:
        return targets | dict.fromkeys(previous.keys() & usage.keys(), _NO_REDUCTION)
    capacities = pool.capacities
    mean = sum(capacities[a] * value for a, value in compared.items()) / pool.total_capacity(compared)
    if not previous and max(usage.values()) <= _cpu_bound(mean, _SHRINK_RATIO):
        return targets
    full_share_usage = {
        a: value / previous[a].share if a in previous else value for a, value in usage.items()
    }
    reference = _reference_cpu(mean, {a: full_share_usage[a] for a in compared}, capacities)
    high, low = _cpu_bound(reference, _SHRINK_RATIO), _cpu_bound(reference, _RECOVER_RATIO)
    for address, own in usage.items():
        current = previous[address].share if address in previous else 1.0
        if own > high:
            target = max(MIN_SHARE, current * reference / own)
            reason = f"its CPU is at {own:.0%}, where {reference:.0%} is normal in its group"
            targets[address] = _FactorTarget(
                target, 1, reason, max(current - target, MIN_SHARE) / _CPU_ADJUST_SECONDS
            )
        elif address in previous and full_share_usage[address] > reference:
            targets[address] = _recovery_target(
                own, current, current if own >= low else min(1.0, current * low / own)
            )
        elif address in previous:
            targets[address] = _NO_REDUCTION
    return targets


def _recovery_target(own: float, current: float, target: float) -> _FactorTarget:
    if target == 1.0:
        return _NO_REDUCTION
    rate = max(target - current, MIN_SHARE) / _CPU_ADJUST_SECONDS
    return _FactorTarget(target, 1, f"its CPU is at {own:.0%} with a reduced share", rate)


def _cpu_bound(reference: float, ratio: float) -> float:
    """Return the CPU usage at which the reference has `ratio` times as much headroom."""
    return _CPU_HEADROOM_CEILING - (_CPU_HEADROOM_CEILING - reference) / ratio


def _reference_cpu(
    mean: float, full_share_usage: Mapping[str, float], capacities: Mapping[str, int]
) -> float:
    """Return the mean CPU usage, or more: what at least half of the capacity would use with full shares.

    A node that idles while the others work has just started, or fails its requests quickly. Then the others
    are not too busy, and must not all give their sessions to that one.
    """
    remaining = sum(capacities[a] for a in full_share_usage) / 2
    above = sorted(
        ((value, capacities[a]) for a, value in full_share_usage.items() if value > mean), reverse=True
    )
    for value, capacity in above:
        remaining -= capacity
        if remaining < 0:
            return value
    return mean

"""Scale nodes' shares of the sessions by their health, memory and CPU. No I/O.

Each factor multiplies a node's share by a value from `MIN_SHARE` to 1. The value approaches its target at a
limited rate, so that a wrong or late metric moves few sessions. A node is compared only with its group, and a
problem that most nodes of the group have reduces no share. When a metric becomes unknown, a share that it
reduced recovers slowly (docs/internals/decisions/0010-shares-instead-of-scores.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.balance import metric_levels
from controlplane.decide.balance.locality import serving_by_group
from controlplane.decide.inputs import Inputs
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import BalancePolicy, EdsHealth, Factor, NodePlan

# The names of the factors, in the order in which they apply.
HEALTH, MEMORY, CPU = NAMES = ("health", "memory", "cpu")

# Lower limit of a factor, because only a node with some sessions can show that it has recovered.
MIN_SHARE = 0.02
# The target at memory level 1, when memory is short but not critical.
REDUCED_SHARE = 0.5
# How much a share changes per second; 1 is a full share.
SLOW_SHARE_PER_SECOND, FAST_SHARE_PER_SECOND = 1 / 60, 1 / 10
# A step counts at most this much elapsed time, since a pause of the process must not cause a large step.
_MAX_STEP_SECONDS = 10.0

# A node's CPU headroom is this ceiling minus its usage. Nodes are compared by headroom, so that differences
# between busy nodes count for more than differences between idle nodes.
_CPU_HEADROOM_CEILING = 1.3
_MAX_CPU_USED = 1.2
# A node's share shrinks while the other nodes have over 1.2 times its headroom, and recovers while they have
# less than 1.1 times its headroom.
_SHRINK_RATIO, _RECOVER_RATIO = 1.2, 1.1
# A share changes at the speed that would bring it to its target in this time. A faster change would
# oscillate, because a CPU value covers the last 30 s, and sessions take time to migrate.
_CPU_ADJUST_SECONDS = 60.0

NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class _FactorTarget:
    """The target of a factor: share, metric level and reason."""

    share: float
    level: int
    reason: str
    share_per_second: float = SLOW_SHARE_PER_SECOND  # speed of the approach


_NO_REDUCTION = _FactorTarget(1.0, 0, "")
_METRIC_UNKNOWN = _FactorTarget(1.0, 0, NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The nodes of one group that receive sessions, with their metrics."""

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


def advance_factors(planned: Mapping[str, NodePlan], inputs: Inputs) -> dict[str, Mapping[str, Factor]]:
    """Return the factors of the nodes in service by address and name, without factors that have no effect.

    The factors continue from those of the previous plan, which date from its `weights_computed_at`. A node's
    CPU is not compared during its slow start, when the node has few sessions.
    """
    previous, facts, policy, now, _ = inputs
    if policy.balance_policy is BalancePolicy.CONNECTION:
        return {}
    before = {a: p.factors for a, p in previous.nodes.items() if p.factors}
    if not facts.node_metrics and not before:
        return {}
    elapsed = min(max(now - previous.weights_computed_at, 0.0), _MAX_STEP_SECONDS)
    served = {a: p for a, p in planned.items() if p.eds_health is EdsHealth.HEALTHY}
    advanced: dict[str, Mapping[str, Factor]] = {}
    for addresses in serving_by_group(served).values():
        pool = _build_pool(addresses, served, before, inputs)
        targets = _targets(pool)
        for address in dict.fromkeys([a for name in NAMES for a in targets[name]]):
            old_factors = pool.previous_factors.get(address, EMPTY_MAP)
            stepped = {
                name: _step_factor(old_factors.get(name), targets[name][address], elapsed)
                for name in NAMES
                if address in targets[name]
            }
            reduced = {name: factor for name, factor in stepped.items() if factor.share < 1 or factor.level}
            if reduced:
                advanced[address] = MappingProxyType(reduced)
    return advanced


def _build_pool(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    previous_factors: Mapping[str, Mapping[str, Factor]],
    inputs: Inputs,
) -> _Pool:
    facts, now = inputs.facts, inputs.now
    # Nodes that became active later are in their slow start.
    active_before = now - inputs.policy.slow_start
    cpu_usage, suspect, unmeasured = {}, {}, []
    oldest = now - metric_levels.CPU_MAX_AGE_SECONDS
    for address in addresses:
        metrics = facts.node_metrics.get(address)
        if metrics is None:
            unmeasured.append(address)
            continue
        if not metric_levels.is_certainly_normal(metrics, now):
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
        previous_factors={a: previous_factors[a] for a in addresses if a in previous_factors},
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
    """Return the targets by factor and address, without nodes whose factor is 1 and stays 1."""
    health = _health_targets(pool)
    avoided = {a for a, target in health.items() if target.share < 1}
    memory = _memory_targets(pool, avoided)
    avoided |= {a for a, target in memory.items() if target.share < 1}
    return {HEALTH: health, MEMORY: memory, CPU: _cpu_targets(pool, avoided)}


# --- health and memory: levels -----------------------------------------------------------------------------


def _levels_and_initial_targets(
    name: str, level_of: Callable[[NodeMetrics, int, float], int | None], pool: _Pool
) -> tuple[dict[str, int], int, dict[str, _FactorTarget]]:
    """Return the levels above 0, the total capacity of all nodes with a known level, and initial targets.

    The initial target of each node that has this factor is a share of 1.
    """
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
    levels, known, targets = _levels_and_initial_targets(HEALTH, metric_levels.health_level, pool)
    is_common = 2 * pool.total_capacity(levels) > known
    for address, level in levels.items():
        reason = metric_levels.failure_summary(
            pool.suspect[address], pool.now, above=metric_levels.NORMAL_FAILURE_RATIO
        )
        targets[address] = _level_target(1.0 if is_common else MIN_SHARE, level, reason)
    return targets


def _memory_targets(pool: _Pool, avoided: Collection[str]) -> dict[str, _FactorTarget]:
    """Return the memory targets. The reduced and the `avoided` nodes have at most half of the capacity."""
    levels, known, targets = _levels_and_initial_targets(MEMORY, metric_levels.memory_level, pool)
    total = pool.total_capacity(pool.capacities)
    reducing_levels = set()
    for min_level in (1, 2):
        short = {a for a, level in levels.items() if level >= min_level}
        if 2 * pool.total_capacity(short) <= known and 2 * pool.total_capacity(short | set(avoided)) <= total:
            reducing_levels.add(min_level)
    for address, level in levels.items():
        metrics = pool.suspect[address]
        is_critical = level == 2 and 2 in reducing_levels
        share = MIN_SHARE if is_critical else REDUCED_SHARE if 1 in reducing_levels else 1.0
        is_urgent = is_critical and metric_levels.is_memory_urgent(metrics, pool.now)
        rate = FAST_SHARE_PER_SECOND if is_urgent else SLOW_SHARE_PER_SECOND
        targets[address] = _level_target(share, level, metric_levels.memory_summary(metrics, pool.now), rate)
    return targets


def _level_target(
    share: float, level: int, reason: str, share_per_second: float = SLOW_SHARE_PER_SECOND
) -> _FactorTarget:
    note = "; most nodes of its group have the same problem, so it keeps its share" if share == 1 else ""
    return _FactorTarget(share, level, reason + note, share_per_second)


# --- CPU: compared with the group --------------------------------------------------------------------------


def _cpu_targets(pool: _Pool, avoided: Collection[str]) -> dict[str, _FactorTarget]:
    """Return the CPU targets, which reduce the share of a node while it is much busier than the others.

    The usage counts whatever its cause, so a node that stays busy with fewer sessions gets still fewer.
    Between the bounds `low` and `high`, a share does not change.
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
        elif address in previous:
            targets[address] = _NO_REDUCTION
            if full_share_usage[address] <= reference:
                continue
            target = current if own >= low else min(1.0, current * low / own)
            if target < 1:
                rate = max(target - current, MIN_SHARE) / _CPU_ADJUST_SECONDS
                reason = f"its CPU is at {own:.0%} with a reduced share"
                targets[address] = _FactorTarget(target, 1, reason, rate)
    return targets


def _cpu_bound(reference: float, ratio: float) -> float:
    """Return the CPU usage whose headroom is the headroom at `reference`, divided by `ratio`."""
    return _CPU_HEADROOM_CEILING - (_CPU_HEADROOM_CEILING - reference) / ratio


def _reference_cpu(
    mean: float, full_share_usage: Mapping[str, float], capacities: Mapping[str, int]
) -> float:
    """Return the larger of the mean CPU usage and the capacity-weighted median usage at full shares.

    Without the median, one idle node would make all others look too busy. Such a node has just started, or
    its requests fail quickly, so the others must not all send it their sessions.
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

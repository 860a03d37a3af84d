"""How nodes' health, memory and CPU bear on their share of the sessions. Pure.

Each factor of a node is a share, from `LEAST` to 1, of what the node would have without it. It goes to its
target at a bounded speed, so that neither a wrong reading nor a late one makes sessions swarm. The factors
are taken in order, and each compares a node with the others of its group only: a sign that most of them show
says nothing of the node. A sign that is not known is neither good nor bad, so what it has taken of a share
comes back slowly (docs/internals/decisions/0010-shares-instead-of-scores.md).
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

# In the order in which they are taken.
HEALTH, MEMORY, CPU = NAMES = ("health", "memory", "cpu")

# No share is smaller: a node that gets nothing could not show that it has recovered.
MIN_SHARE = 0.02
# The target where memory is short, but not yet dangerously.
REDUCED_SHARE = 0.5
# Of a full share, per second.
SLOW_SHARE_PER_SECOND, FAST_SHARE_PER_SECOND = 1 / 60, 1 / 10
# Seconds without a decision (a pause, a clock that was set) for which shares go on at most.
_MAX_STEP_SECONDS = 10.0

# CPU: what a node has left up to here counts, so that busy nodes are compared more finely than idle ones.
_CPU_HEADROOM_CEILING = 1.3
_MAX_CPU_USED = 1.2
# It gives sessions away when the others have so many times as much left, and takes some back below this.
_SHRINK_RATIO, _RECOVER_RATIO = 1.2, 1.1
# Seconds in which it would go all the way to its target. A reading is of the last 30 s, and sessions take
# their time to move: faster, and shares would swing.
_CPU_ADJUST_SECONDS = 60.0

NOT_KNOWN = "not known"
_COMMON_TO_GROUP_NOTE = "; most nodes of its group are no better, so that is no reason to avoid it"


@dataclass(frozen=True, slots=True)
class _FactorTarget:
    """Where a factor is to go, and why."""

    share: float
    level: int
    reason: str
    share_per_second: float = SLOW_SHARE_PER_SECOND  # of a full share, per second


_NO_REDUCTION = _FactorTarget(1.0, 0, "")
_METRIC_UNKNOWN = _FactorTarget(1.0, 0, NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Nodes that share the same sessions, all in service, with what is known of them."""

    capacities: Mapping[str, int]
    cpu_usage: Mapping[str, float]  # CPU, where it is known, of those whose slow start is over
    suspect: Mapping[str, NodeMetrics]  # of those whose health or memory may be a reason for something
    unmeasured: Collection[str]  # those of whom nothing is known
    previous_factors: Mapping[str, Mapping[str, Factor]]
    now: float

    def previous(self, name: str) -> dict[str, Factor]:
        """One factor as it was, of the nodes that had it."""
        return {address: each[name] for address, each in self.previous_factors.items() if name in each}

    def total_capacity(self, addresses: Collection[str]) -> int:
        """Of some of the nodes together."""
        return sum(self.capacities[address] for address in addresses)


def combined_share(factors: Mapping[str, Factor]) -> float:
    """What is left of a node's share when all of its factors have taken from it."""
    product = 1.0
    for factor in factors.values():
        product *= factor.share
    return product


def advance_factors(
    planned: Mapping[str, NodePlan], previous: Plan, facts: Facts, policy: Policy, now: float
) -> dict[str, Mapping[str, Factor]]:
    """The factors of the nodes in service, by address, and then by name: those that are not simply 1.

    `previous` has them as they were at its `weighed_at`. The CPU of nodes that come into service is compared
    after their slow start: until then they have fewer sessions by our own wish.
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
            factors = {name: targets[name][address] for name in NAMES if address in targets[name]}
            old_factors = pool.previous_factors.get(address, EMPTY_MAP)
            stepped = {
                name: _step_factor(old_factors.get(name), aim, elapsed) for name, aim in factors.items()
            }
            kept = {name: each for name, each in stepped.items() if each.share < 1 or each.level}
            if kept:
                advanced[address] = MappingProxyType(kept)
    return advanced


def _build_pool(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    previous_factors: Mapping[str, Mapping[str, Factor]],
    facts: Facts,
    active_before: float,
    now: float,
) -> _Pool:
    """`latest`: nodes that have come into service after that are in their slow start."""
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
    """By factor, and then by address: where all are to go that are not simply 1, and to stay there."""
    health = _health_targets(pool)
    avoided = {a for a, aim in health.items() if aim.share < 1}
    memory = _memory_targets(pool, avoided)
    avoided |= {a for a, aim in memory.items() if aim.share < 1}
    return {HEALTH: health, MEMORY: memory, CPU: _cpu_targets(pool, avoided)}


# --- health and memory: levels -----------------------------------------------------------------------------


def _evaluate_levels(
    name: str, level_of: Callable[[NodeMetrics, int, float], int | None], pool: _Pool
) -> tuple[dict[str, int], int, dict[str, _FactorTarget]]:
    """Levels above 0, the capacity of the nodes that have one at all, and the aims of those that had."""
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
    """As for health; beside the nodes that are `avoided` already, at most half of the capacity is, too."""
    levels, known, targets = _evaluate_levels(MEMORY, metric_levels.memory_level, pool)
    total = pool.total_capacity(pool.capacities)
    acting = set()
    for min_level in (1, 2):
        short = {a for a, level in levels.items() if level >= min_level}
        if 2 * pool.total_capacity(short) <= known and 2 * pool.total_capacity(short | set(avoided)) <= total:
            acting.add(min_level)
    for address, level in levels.items():
        reason = metric_levels.memory_summary(pool.suspect[address], pool.now)
        if level == 2 and 2 in acting:
            is_urgent = metric_levels.is_memory_urgent(pool.suspect[address], pool.now)
            targets[address] = _FactorTarget(
                MIN_SHARE, level, reason, FAST_SHARE_PER_SECOND if is_urgent else SLOW_SHARE_PER_SECOND
            )
        elif 1 in acting:
            targets[address] = _FactorTarget(REDUCED_SHARE, level, reason)
        else:
            targets[address] = _FactorTarget(1.0, level, reason + _COMMON_TO_GROUP_NOTE)
    return targets


# --- CPU: compared ------------------------------------------------------------------------------------------


def _cpu_targets(pool: _Pool, avoided: Collection[str]) -> dict[str, _FactorTarget]:
    """A node that is much busier than the others gets less, until it is not.

    It goes by what the node uses, whatever it uses it for: one that stays busy with fewer sessions gets fewer
    still. Between the two bounds nothing moves.
    """
    previous = pool.previous(CPU)
    used = pool.cpu_usage
    targets = dict.fromkeys(previous.keys() - used.keys(), _METRIC_UNKNOWN)
    compared = {a: value for a, value in used.items() if a not in avoided} if avoided else used
    if not compared:
        return targets | dict.fromkeys(previous.keys() & used.keys(), _NO_REDUCTION)
    capacities = pool.capacities
    mean = sum(capacities[a] * value for a, value in compared.items()) / pool.total_capacity(compared)
    if not previous and max(used.values()) <= _cpu_bound(mean, _SHRINK_RATIO):
        return targets
    full_share_usage = {a: value / previous[a].share if a in previous else value for a, value in used.items()}
    reference = _reference_cpu(mean, {a: full_share_usage[a] for a in compared}, capacities)
    high, low = _cpu_bound(reference, _SHRINK_RATIO), _cpu_bound(reference, _RECOVER_RATIO)
    for address, own in used.items():
        current = previous[address].share if address in previous else 1.0
        if own > high:
            target = max(MIN_SHARE, current * reference / own)
            reason = f"its CPU is at {own:.0%}, where {reference:.0%} is usual"
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
    pace = max(target - current, MIN_SHARE) / _CPU_ADJUST_SECONDS
    return _FactorTarget(target, 1, f"its CPU is at {own:.0%} with less than its full share", pace)


def _cpu_bound(reference: float, ratio: float) -> float:
    """The CPU at which others have so many times as much left."""
    return _CPU_HEADROOM_CEILING - (_CPU_HEADROOM_CEILING - reference) / ratio


def _reference_cpu(
    mean: float, full_share_usage: Mapping[str, float], capacities: Mapping[str, int]
) -> float:
    """The mean, or more: as much as half of the capacity would use at least. `full`: with full shares.

    A node that idles beside others is new to its work, or fails at it quickly. Then the others are not all
    too busy, and must not all give their sessions to that one.
    """
    half = sum(capacities[a] for a in full_share_usage) / 2
    above = sorted(
        ((value, capacities[a]) for a, value in full_share_usage.items() if value > mean), reverse=True
    )
    for value, capacity in above:
        half -= capacity
        if half < 0:
            return value
    return mean

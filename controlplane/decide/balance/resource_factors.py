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
from controlplane.decide.balance.locality import pools
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import NOTHING
from controlplane.model.plan import Advice, Factor, NodePlan, Plan, Policy, Strategy

# In the order in which they are taken.
HEALTH, MEMORY, CPU = NAMES = ("health", "memory", "cpu")

# No share is smaller: a node that gets nothing could not show that it has recovered.
LEAST = 0.02
# The target where memory is short, but not yet dangerously.
HALF = 0.5
# Of a full share, per second.
SLOW, FAST = 1 / 60, 1 / 10
# Seconds without a decision (a pause, a clock that was set) for which shares go on at most.
_LONGEST_STEP = 10.0

# CPU: what a node has left up to here counts, so that busy nodes are compared more finely than idle ones.
_CEILING = 1.3
_MOST_USED = 1.2
# It gives sessions away when the others have so many times as much left, and takes some back below this.
_ACTS, _COMES_BACK = 1.2, 1.1
# Seconds in which it would go all the way to its target. A reading is of the last 30 s, and sessions take
# their time to move: faster, and shares would swing.
_SETTLING = 60.0

NOT_KNOWN = "not known"
_COMMON = "; most nodes of its group are no better, so that is no reason to avoid it"


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where a factor is to go, and why."""

    target: float
    level: int
    reason: str
    pace: float = SLOW  # of a full share, per second


_FREE = _Aim(1.0, 0, "")
_UNKNOWN = _Aim(1.0, 0, NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Nodes that share the same sessions, all in service, with what is known of them."""

    capacities: Mapping[str, int]
    busyness: Mapping[str, float]  # CPU, where it is known, of those whose slow start is over
    uneasy: Mapping[str, Vitals]  # of those whose health or memory may be a reason for something
    strangers: Collection[str]  # those of whom nothing is known
    before: Mapping[str, Mapping[str, Factor]]
    now: float

    def was(self, name: str) -> dict[str, Factor]:
        """One factor as it was, of the nodes that had it."""
        return {address: each[name] for address, each in self.before.items() if name in each}

    def capacity(self, addresses: Collection[str]) -> int:
        """Of some of the nodes together."""
        return sum(self.capacities[address] for address in addresses)


def share(factors: Mapping[str, Factor]) -> float:
    """What is left of a node's share when all of its factors have taken from it."""
    product = 1.0
    for factor in factors.values():
        product *= factor.share
    return product


def advance(
    planned: Mapping[str, NodePlan], previous: Plan, facts: Facts, policy: Policy, now: float
) -> dict[str, Mapping[str, Factor]]:
    """The factors of the nodes in service, by address, and then by name: those that are not simply 1.

    `previous` has them as they were at its `weighed_at`. The CPU of nodes that come into service is compared
    after their slow start: until then they have fewer sessions by our own wish.
    """
    if policy.strategy is Strategy.CONNECTION:
        return {}
    before = {a: p.factors for a, p in previous.nodes.items() if p.factors}
    if not facts.vitals and not before:
        return {}
    elapsed = min(max(now - previous.weighed_at, 0.0), _LONGEST_STEP)
    served = {a: p for a, p in planned.items() if p.advice is Advice.HEALTHY}
    moved: dict[str, Mapping[str, Factor]] = {}
    for addresses in pools(served).values():
        pool = _pool(addresses, served, before, facts, now - policy.slow_start, now)
        aims = _aims(pool)
        for address in dict.fromkeys([a for name in NAMES for a in aims[name]]):
            factors = {name: aims[name][address] for name in NAMES if address in aims[name]}
            was = pool.before.get(address, NOTHING)
            stepped = {name: _moved(was.get(name), aim, elapsed) for name, aim in factors.items()}
            kept = {name: each for name, each in stepped.items() if each.share < 1 or each.level}
            if kept:
                moved[address] = MappingProxyType(kept)
    return moved


def _pool(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    before: Mapping[str, Mapping[str, Factor]],
    facts: Facts,
    latest: float,
    now: float,
) -> _Pool:
    """`latest`: nodes that have come into service after that are in their slow start."""
    busyness, uneasy, strangers = {}, {}, []
    oldest = now - metric_levels.CPU_LASTS
    for address in addresses:
        vitals = facts.vitals.get(address)
        if vitals is None:
            strangers.append(address)
            continue
        if not metric_levels.is_calm(vitals, now):
            uneasy[address] = vitals
        cpu = vitals.cpu
        if cpu is not None and cpu.at >= oldest:
            since = served[address].active_since
            if since is None or since <= latest:
                busyness[address] = min(max(cpu.value, 0.0), _MOST_USED)
    return _Pool(
        capacities={a: served[a].node.weight for a in addresses},
        busyness=busyness,
        uneasy=uneasy,
        strangers=strangers,
        before={a: before[a] for a in addresses if a in before} if before else NOTHING,
        now=now,
    )


def _moved(was: Factor | None, aim: _Aim, elapsed: float) -> Factor:
    held = 1.0 if was is None else was.share
    step = aim.pace * elapsed
    reached = max(aim.target, held - step) if aim.target < held else min(aim.target, held + step)
    return Factor(reached, aim.target, aim.level, aim.reason)


def _aims(pool: _Pool) -> dict[str, dict[str, _Aim]]:
    """By factor, and then by address: where all are to go that are not simply 1, and to stay there."""
    health = _health(pool)
    avoided = {a for a, aim in health.items() if aim.target < 1}
    memory = _memory(pool, avoided)
    avoided |= {a for a, aim in memory.items() if aim.target < 1}
    return {HEALTH: health, MEMORY: memory, CPU: _cpu(pool, avoided)}


# --- health and memory: levels -----------------------------------------------------------------------------


def _levels(
    name: str, judge: Callable[[Vitals, int, float], int | None], pool: _Pool
) -> tuple[dict[str, int], int, dict[str, _Aim]]:
    """Levels above 0, the capacity of the nodes that have one at all, and the aims of those that had."""
    was = pool.was(name)
    levels: dict[str, int] = {}
    unknown = set(pool.strangers)
    for address, vitals in pool.uneasy.items():
        level = judge(vitals, was[address].level if address in was else 0, pool.now)
        if level:
            levels[address] = level
        elif level is None:
            unknown.add(address)
    known = pool.capacity(pool.capacities) - pool.capacity(unknown)
    return levels, known, {a: _UNKNOWN if a in unknown else _FREE for a in was}


def _health(pool: _Pool) -> dict[str, _Aim]:
    levels, known, aims = _levels(HEALTH, metric_levels.health, pool)
    is_common = 2 * pool.capacity(levels) > known
    for address, level in levels.items():
        reason = metric_levels.failing(pool.uneasy[address], pool.now)
        aims[address] = _Aim(1.0, level, reason + _COMMON) if is_common else _Aim(LEAST, level, reason)
    return aims


def _memory(pool: _Pool, avoided: Collection[str]) -> dict[str, _Aim]:
    """As for health; beside the nodes that are `avoided` already, at most half of the capacity is, too."""
    levels, known, aims = _levels(MEMORY, metric_levels.memory, pool)
    total = pool.capacity(pool.capacities)
    acting = set()
    for bound in (1, 2):
        short = {a for a, level in levels.items() if level >= bound}
        if 2 * pool.capacity(short) <= known and 2 * pool.capacity(short | set(avoided)) <= total:
            acting.add(bound)
    for address, level in levels.items():
        reason = metric_levels.filling(pool.uneasy[address], pool.now)
        if level == 2 and 2 in acting:
            is_urgent = metric_levels.is_urgent(pool.uneasy[address], pool.now)
            aims[address] = _Aim(LEAST, level, reason, FAST if is_urgent else SLOW)
        elif 1 in acting:
            aims[address] = _Aim(HALF, level, reason)
        else:
            aims[address] = _Aim(1.0, level, reason + _COMMON)
    return aims


# --- CPU: compared ------------------------------------------------------------------------------------------


def _cpu(pool: _Pool, avoided: Collection[str]) -> dict[str, _Aim]:
    """A node that is much busier than the others gets less, until it is not.

    It goes by what the node uses, whatever it uses it for: one that stays busy with fewer sessions gets fewer
    still. Between the two bounds nothing moves.
    """
    was = pool.was(CPU)
    used = pool.busyness
    aims = dict.fromkeys(was.keys() - used.keys(), _UNKNOWN)
    compared = {a: value for a, value in used.items() if a not in avoided} if avoided else used
    if not compared:
        return aims | dict.fromkeys(was.keys() & used.keys(), _FREE)
    capacities = pool.capacities
    mean = sum(capacities[a] * value for a, value in compared.items()) / pool.capacity(compared)
    if not was and max(used.values()) <= _bound(mean, _ACTS):
        return aims
    full = {a: value / was[a].share if a in was else value for a, value in used.items()}
    usual = _usual(mean, {a: full[a] for a in compared}, capacities)
    high, low = _bound(usual, _ACTS), _bound(usual, _COMES_BACK)
    for address, own in used.items():
        held = was[address].share if address in was else 1.0
        if own > high:
            target = max(LEAST, held * usual / own)
            reason = f"its CPU is at {own:.0%}, where {usual:.0%} is usual"
            aims[address] = _Aim(target, 1, reason, max(held - target, LEAST) / _SETTLING)
        elif address in was and full[address] > usual:
            aims[address] = _returning(own, held, held if own >= low else min(1.0, held * low / own))
        elif address in was:
            aims[address] = _FREE
    return aims


def _returning(own: float, held: float, target: float) -> _Aim:
    if target == 1.0:
        return _FREE
    pace = max(target - held, LEAST) / _SETTLING
    return _Aim(target, 1, f"its CPU is at {own:.0%} with less than its full share", pace)


def _bound(usual: float, times: float) -> float:
    """The CPU at which others have so many times as much left."""
    return _CEILING - (_CEILING - usual) / times


def _usual(mean: float, full: Mapping[str, float], capacities: Mapping[str, int]) -> float:
    """The mean, or more: as much as half of the capacity would use at least. `full`: with full shares.

    A node that idles beside others is new to its work, or fails at it quickly. Then the others are not all
    too busy, and must not all give their sessions to that one.
    """
    half = sum(capacities[a] for a in full) / 2
    above = sorted(((value, capacities[a]) for a, value in full.items() if value > mean), reverse=True)
    for value, capacity in above:
        half -= capacity
        if half < 0:
            return value
    return mean

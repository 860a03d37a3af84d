"""Who gives how many sessions to whom, among nodes that share theirs, and through which Envoys. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from controlplane.decide.balance.apportion import apportion
from controlplane.decide.balance.fair_share import Standing
from controlplane.model.plan import Policy
from controlplane.model.traffic import Census

# Seconds that a round lasts at most: so long it may go at the speed that is allowed.
LONGEST = 5.0
# A node may lack so many times what another may have too many: new sessions find it by themselves.
_PATIENCE = 2.0

Counts = Mapping[str, Mapping[str, int]]  # by address of a node, then by instance of an Envoy


class Ask(NamedTuple):
    """Sessions that are to leave nodes (`moves`), and those that nodes are to get for that (`wants`)."""

    group: str
    moves: Counts
    wants: Counts
    sessions: int  # in all
    reason: str  # for whose sake, as a sentence


def ask(
    group: str,
    standing: Mapping[str, Standing],
    chance: Mapping[str, float],
    asked: Sequence[Census],
    policy: Policy,
    turn: int,
) -> Ask | None:
    """What is to move now; None when nothing is worth it, or nobody can be asked.

    `turn` is another number each time, so that who was asked in vain is not asked again before others.

    Those give that are the furthest above their share, and those get that are the furthest below. No node
    gives so much that it has less than its share, nor gets so many that it has more.
    """
    giving = {a: s.surplus for a, s in standing.items() if s.surplus > 0}
    getting = {a: s.lack for a, s in standing.items() if s.lack > 0}
    if not giving or not getting:
        return None
    over = {a: n for a, n in giving.items() if n > _borne(standing[a].most_share, chance[a], policy)}
    under = {
        a: n for a, n in getting.items() if n > _PATIENCE * _borne(standing[a].least_share, chance[a], policy)
    }
    wished = max(sum(over.values()), sum(under.values()))
    count = min(wished, sum(giving.values()), sum(getting.values()), most(policy))
    if not count:
        return None
    moves: dict[str, Mapping[str, int]] = {}
    left = count
    for address in _by_distance(giving, standing):
        if not left:
            break  # of thousands of nodes a few give all that a round may ask for
        there = {c.instance: n for c in asked if (n := c.sessions.get(address, 0))}
        if given := apportion(min(left, giving[address]), there, turn):
            moves[address] = MappingProxyType(given)
            left -= sum(given.values())
    if not moves:
        return None
    wants = through(moves, _furthest(count - left, getting, standing))
    return Ask(group, MappingProxyType(moves), wants, count - left, _reason(over, under, standing))


def most(policy: Policy) -> int:
    """How many sessions one round may ask for."""
    return max(1, int(policy.rebalance_per_second * LONGEST))


def _borne(share: int, chance: float, policy: Policy) -> float:
    """By how many sessions a node may be off its share."""
    return max(policy.rebalance_threshold * share, chance)


def _furthest(count: int, limits: Mapping[str, int], standing: Mapping[str, Standing]) -> dict[str, int]:
    """`count` shared out, to each node up to its limit, those first that are the furthest off their share."""
    left, shared = count, {}
    for address in _by_distance(limits, standing):
        if part := min(left, limits[address]):
            shared[address] = part
            left -= part
    return shared


def _by_distance(off: Mapping[str, int], standing: Mapping[str, Standing]) -> list[str]:
    """Nodes by how far they are off their share, the furthest first."""
    return sorted(off, key=lambda a: (-off[a] / (standing[a].most_share + 1), a))


def through(moves: Counts, getting: Mapping[str, int]) -> Counts:
    """What each node gets through which Envoy: of each Envoy as many as it is to move, in all."""
    leaving: dict[str, int] = {}
    for counts in moves.values():
        for instance, count in counts.items():
            leaving[instance] = leaving.get(instance, 0) + count
    wants: dict[str, Mapping[str, int]] = {}
    envoys = sorted(leaving)
    for address, count in getting.items():
        left = count
        parts: dict[str, int] = {}
        while left and envoys:
            instance = envoys[0]
            part = min(left, leaving[instance])
            parts[instance] = part
            left -= part
            leaving[instance] -= part
            if not leaving[instance]:
                envoys.pop(0)
        if parts:
            wants[address] = MappingProxyType(parts)
    return MappingProxyType(wants)


def _reason(over: Mapping[str, int], under: Mapping[str, int], standing: Mapping[str, Standing]) -> str:
    """The node that is the furthest off, in words."""
    off = over if sum(over.values()) >= sum(under.values()) else under
    address = max(off, key=lambda a: (off[a], a))
    node = standing[address]
    said = f"{address} has {node.most} sessions and its share is {node.most_share}"
    others = len(off) - 1
    more = "1 more node is" if others == 1 else f"{others} more nodes are"
    return f"{said}, and {more} off theirs" if others else said

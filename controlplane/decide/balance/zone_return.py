"""Sessions that go back to the zone of their Envoys, once that has room for them again. Pure.

Envoys keep to the nodes of their zone, but not while these are full or away. What they have sent elsewhere in
that time would stay there, for as long as its clients do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from controlplane.decide.balance.balancing_groups import Sharers
from controlplane.decide.balance.fair_share import Standing, whole_shares
from controlplane.decide.balance.migration_batch import Ask, Counts, most, through
from controlplane.model.plan import NodePlan, Policy, Strategy
from controlplane.model.traffic import Census


def homing(
    sharers: Sharers,
    standing: Mapping[str, Standing],
    served: Mapping[str, NodePlan],
    level: float,
    asked: Mapping[str, Census],
    zones: Mapping[str, str],
    policy: Policy,
    turn: int,
) -> Ask | None:
    """What is to go back to the nodes of a zone; None when nothing is elsewhere, or there is no room.

    `sharers` are these nodes, `standing` is how they stand; `asked` and `zones` are by Envoy. By place and
    load there is room up to `level`, the sessions of the whole group for each unit of its capacity: below
    that no zone is ever full.
    """
    count = most(policy)
    if policy.strategy is not Strategy.LOCATION:
        most_here = math.floor(level * sum(sharers.capacities.values()))
        count = min(count, most_here - sum(each.most for each in standing.values()))
    if count < 1:
        return None
    elsewhere = {a for a, p in served.items() if p.group == sharers.group and p.zone != sharers.zone}
    envoys = [census for envoy, census in asked.items() if zones.get(envoy) == sharers.zone]
    first = turn % len(envoys) if envoys else 0
    moves = _taken(count, envoys[first:] + envoys[:first], elsewhere)
    if not moves:
        return None
    count = sum(sum(counts.values()) for counts in moves.values())
    has = [each.most for each in standing.values()]
    shares = whole_shares(list(sharers.capacities.values()), has, has, more=count)
    getting = {a: n - h for a, n, h in zip(standing, shares, has, strict=True) if n > h}
    reason = f"Envoys of zone {sharers.zone} have sessions elsewhere, and it has room for them"
    return Ask(sharers.group, moves, through(moves, getting), count, reason)


def _taken(count: int, envoys: Sequence[Census], elsewhere: Collection[str]) -> Counts:
    """So many sessions from these nodes, or all there are; from one Envoy after the other."""
    moves: dict[str, dict[str, int]] = {}
    left = count
    for census in envoys:
        if not left:
            break
        for address in sorted(census.sessions.keys() & elsewhere):
            if part := min(left, census.sessions[address]):
                moves.setdefault(address, {})[census.instance] = part
                left -= part
    return MappingProxyType({address: MappingProxyType(counts) for address, counts in moves.items()})

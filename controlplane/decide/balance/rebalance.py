"""How many sessions are asked to leave which node, for which others, through which Envoy. Pure.

Nodes that have more sessions than their share give some away, to nodes that have fewer. Neither does so for
a few that chance may explain, and that new sessions will make up for.

It goes in rounds, since what has moved shows only in later reports. A round asks for a number of sessions,
lasts a few seconds, and is withdrawn. The next is decided when each Envoy that takes part has told where its
sessions are since then. So nothing is asked for twice, nor anything at all without new reports
(docs/internals/decisions/0009-rebalancing-goes-in-rounds.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from controlplane.decide import session_counts
from controlplane.decide.balance.balancing_groups import Sharers, quarters
from controlplane.decide.balance.fair_share import Standing, standings
from controlplane.decide.balance.migration_batch import LONGEST, Ask, ask, most
from controlplane.decide.balance.zone_return import homing
from controlplane.model.facts import Facts
from controlplane.model.nodes import NOTHING, Quarter, State
from controlplane.model.plan import NodePlan, Plan, Policy, Rebalance
from controlplane.model.traffic import MOVED, Census, moves_by_reason

# Seconds that a round lasts at least: the more it asks for, the longer.
_SHORTEST = 1.0
# Seconds of opened and ended sessions that counts may not know of yet; chance is taken to account for so many
# times the standard deviation of that.
_UNTOLD, _DEVIATIONS = 3.0, 1.5
# Rounds in a row that may change nothing; then seconds until the next one, twice as many after each, at most.
_BORNE, _PAUSE, _LONGEST_PAUSE = 3, 10.0, 300.0
# A round for fewer sessions is nothing that anybody has to hear of.
_TOLD = 10

_EVEN = "all nodes have about their share, or what they have beyond it cannot move"


def rebalance(
    planned: Mapping[str, NodePlan],
    full: Collection[Quarter],
    floor: str,
    previous: Plan,
    facts: Facts,
    policy: Policy,
    now: float,
) -> Rebalance:
    """What is asked for now. `planned`, `full` and `floor` are the new plan's, `previous` is the last one."""
    before = previous.rebalance
    if not policy.rebalance:
        return _over(before, "it was switched off", now)
    if floor:
        return _over(before, "the checks of nodes are not trusted", now)
    served = {a: p for a, p in planned.items() if p.state is State.ACTIVE}
    if _differ(previous, served):
        before = replace(before, futile=0, rests_until=0.0) if before.futile else before
        if before.moves:
            return _withdrawn(before, now)  # the shares that it rests on are others now
    if before.moves:
        return _withdrawn(before, now) if now >= before.until else before
    if now - facts.began < policy.fleet_return or now < before.rests_until:
        return before  # nobody knows yet which Envoys there are; or it would change nothing
    asked, unasked = session_counts.able(facts, policy, now)
    if not asked:
        return _over(before, "no Envoy has a module that could be asked", now)
    turn = max(before.round + 1, int(now))  # new, also when the rounds before are forgotten
    there = quarters(served, full, facts.zones, policy, now)
    excess, asks = _asks(there, served, asked, unasked, facts, policy, now, turn)
    if not asks and before.excess < 0:
        return _over(before, _EVEN, now)
    if not _have_told(served, asks, before, asked.values(), facts, policy, now):
        return before  # who has not told yet will
    moved = sum(sum(moves_by_reason(each, MOVED).values()) for each in facts.moves.values())
    if before.excess >= 0:
        before = _judged(before, excess, moved, now)
        if now < before.rests_until:
            return before
    if not asks:
        return _over(before, _EVEN, now)
    chosen = _turns(asks, before.futile, policy)
    moves = {a: counts for each in chosen for a, counts in each.moves.items()}
    wants = {a: counts for each in chosen for a, counts in each.wants.items()}
    count = sum(each.sessions for each in chosen)
    length = count / policy.rebalance_per_second
    is_told = before.since is not None or count >= _TOLD
    return Rebalance(
        since=before.since or now if is_told else None,
        reason=before.reason if before.since is not None else chosen[0].reason,
        round=turn,
        until=now + min(LONGEST, max(_SHORTEST, length)),
        moves=moves,
        wants=wants,
        futile=before.futile,
        excess=excess,
        moved=before.moved if before.futile else moved,
    )


def _asks(
    there: Sequence[Sharers],
    served: Mapping[str, NodePlan],
    asked: Mapping[str, Census],
    unasked: Collection[Census],
    facts: Facts,
    policy: Policy,
    now: float,
    turn: int,
) -> tuple[int, list[Ask]]:
    """How many sessions nodes have beyond their shares, and all that might be asked for."""
    each_standing = [standings(served, each.capacities, unasked, facts, policy, now) for each in there]
    excess, asks = 0, []
    for sharers, standing in zip(there, each_standing, strict=True):
        excess += sum(s.least - s.most_share for s in standing.values() if s.least > s.most_share)
        chance = _chance(sharers, served, facts.arrivals)
        if found := ask(sharers.group, standing, chance, list(asked.values()), policy, turn):
            asks.append(found)
        if sharers.zone:
            level = _level(sharers.group, there, each_standing)
            if found := homing(sharers, standing, served, level, asked, facts.zones, policy, turn):
                excess += found.sessions
                asks.append(found)
    return excess, asks


def _level(group: str, there: Sequence[Sharers], standing: Sequence[Mapping[str, Standing]]) -> float:
    """Sessions of a group for each unit of its capacity."""
    of_group = [(s, n) for s, n in zip(there, standing, strict=True) if s.group == group]
    width = sum(sum(sharers.capacities.values()) for sharers, _ in of_group)
    return sum(each.most for _, numbers in of_group for each in numbers.values()) / width if width else 0.0


def _differ(previous: Plan, served: Mapping[str, NodePlan]) -> bool:
    """Whether nodes came or went, or have another weight or place, so that shares are not what they were."""
    for address, past in previous.nodes.items():
        planned = served.get(address)
        if (past.state is State.ACTIVE) is not (planned is not None):
            return True
        if planned is not None and planned is not past and _share_by(planned) != _share_by(past):
            return True
    return not served.keys() <= previous.nodes.keys()


def _share_by(planned: NodePlan) -> tuple[int, str, bool, str]:
    return planned.node.weight, planned.group, planned.backup, planned.zone


def _over(before: Rebalance, why: str, now: float) -> Rebalance:
    ended = _withdrawn(before, now)
    if before.since is None and before.excess < 0 and not before.futile:
        return ended
    return replace(ended, since=None, reason=why, futile=0, excess=-1, moved=0)


def _withdrawn(before: Rebalance, now: float) -> Rebalance:
    if not before.moves:
        return before
    return replace(before, moves=NOTHING, wants=NOTHING, until=min(before.until, now))


def _judged(before: Rebalance, excess: int, moved: int, now: float) -> Rebalance:
    """What came of the latest round. When rounds change nothing, there is a pause before the next."""
    if moved > before.moved or excess < before.excess:
        return replace(before, futile=0, excess=-1)
    futile = before.futile + 1
    if futile < _BORNE:
        return replace(before, futile=futile, excess=-1)
    pause = min(_LONGEST_PAUSE, _PAUSE * 2.0 ** min(futile - _BORNE, 10))
    return replace(before, futile=futile, excess=-1, rests_until=now + pause)


def _chance(sharers: Sharers, served: Mapping[str, NodePlan], arrivals: float) -> Mapping[str, float]:
    """By how many sessions each node may be off its share without anything being wrong."""
    every = sum(p.node.weight for p in served.values())
    # What opens also ends: the variance is that of two such streams.
    each = 2.0 * arrivals * _UNTOLD / every if every else 0.0
    # Where no session opens, as on a node that only stands in, chance has no part.
    return {
        a: _DEVIATIONS * math.sqrt(each * served[a].node.weight) if capacity else 0.0
        for a, capacity in sharers.capacities.items()
    }


def _turns(asks: Sequence[Ask], futile: int, policy: Policy) -> list[Ask]:
    """What is asked for in this round: at least one, and of all together no more than the speed allows.

    Within an Envoy groups have nothing in common, but zones have: of these one has its turn in a round. Those
    with the most to do come first; after rounds that have changed nothing, others.
    """
    zones: dict[str, list[Ask]] = {}
    for each in sorted(asks, key=lambda each: -each.sessions):
        zones.setdefault(each.group, []).append(each)
    groups = list(zones.values())
    first = futile % len(groups)
    chosen: list[Ask] = []
    left = most(policy)
    for group in groups[first:] + groups[:first]:
        each = group[futile // len(groups) % len(group)]
        if not chosen or each.sessions <= left:
            chosen.append(each)
            left -= each.sessions
    return chosen


def _have_told(
    served: Mapping[str, NodePlan],
    asks: Sequence[Ask],
    before: Rebalance,
    asked: Collection[Census],
    facts: Facts,
    policy: Policy,
    now: float,
) -> bool:
    """Whether all counts are of after the latest round.

    TiDB's own are as soon as no move of it is under way any more. Where one is missing, each Envoy must have
    told since, also of the nodes that are to get some; one that has fallen silent is not waited for.
    """
    settled = before.until + policy.move_limit
    fresh_from = session_counts.counted_from(policy, now)
    counted_at = [
        health.connections_at if (health := facts.health.get(address)) is not None else None
        for address in served
    ]
    if any(at is not None and fresh_from <= at < settled for at in counted_at):
        return False
    getting = {address for each in asks for address in each.wants}
    is_counted = all(at is not None and at >= fresh_from for at in counted_at)
    began = -math.inf if is_counted else settled + session_counts.COUNTED
    return all(census.began >= began and getting <= census.covered for census in asked)

"""How many sessions are asked to leave which node, through which Envoy, for nodes that want some. Pure.

Two questions are kept apart. *Who wants sessions*, and how many: nodes that have come into service lately
and lack some for their share (`_wanted`). *Who gives how many*: nodes with more than their share, and of
these the Envoys that have sessions there (`_split`).

It goes in rounds, since what has moved shows only in later reports. A round asks for a number of sessions,
lasts `ROUND` seconds, and is withdrawn. The next is decided when each Envoy that takes part has told where
its sessions are since then. So nothing is asked for twice, nor anything at all without new reports
(docs/decisions/0009-rebalancing-goes-in-rounds.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from controlplane.decide import occupancy
from controlplane.decide.apportion import apportion
from controlplane.decide.shares import Standing, active_for, standings, whole
from controlplane.model import NOTHING, Facts, NodePlan, Plan, Policy, Rebalance, State
from controlplane.traffic import Census

# Seconds that a round lasts.
ROUND = 5.0
# Seconds after its slow start in which a node that has come into service is still given sessions of others.
_AFTERWARDS = 60.0
# What a node lacks of its share, at least, when a rebalance begins; and sessions, when one goes on.
_LITTLE = 0.1
_FEW = 2

_TOO_LATE = (
    "no node in service is new any more; what those that joined may lack still are sessions that no Envoy"
    " could be asked for, or that could not move"
)

Moves = Mapping[str, Mapping[str, int]]  # by address of the node, then by instance of the Envoy


def rebalance(
    planned: Mapping[str, NodePlan], floor: str, previous: Plan, facts: Facts, policy: Policy, now: float
) -> Rebalance:
    """What is asked for now. `planned` and `floor` are those of the new plan, `previous` is the last one."""
    before = previous.rebalance
    if not policy.rebalance:
        return _over(before, "it was switched off", now)
    if floor:
        return _over(before, "the checks of nodes are not trusted", now)
    latest = now - policy.slow_start - _AFTERWARDS
    joined = [a for a, p in planned.items() if p.active_since is not None and p.active_since > latest]
    if not joined:
        return _over(before, _TOO_LATE, now)
    served = {a: p for a, p in planned.items() if p.state is State.ACTIVE}
    if before.moves:
        # The shares that a round rests on are others when a node is gone, or its weight is another.
        is_void = any(_upsets(p, served.get(a)) for a, p in previous.nodes.items())
        return _withdrawn(before, now) if is_void or now >= before.until else before
    if now - facts.began < policy.fleet_return:
        return before  # nobody knows yet which Envoys there are
    standing = standings(served, facts, policy, now)
    wanted = _wanted(standing, joined, is_under_way=before.since is not None)
    givers = _givers(served, before, facts, policy, now) if wanted.sessions else []
    if givers is None:
        return before  # who has not told yet will
    most = min(wanted.sessions, whole(policy.rebalance_per_second * ROUND))
    if moves := _split(most, standing, givers) if givers else NOTHING:
        return Rebalance(
            since=now if before.since is None else before.since,
            reason=wanted.reason if before.since is None else before.reason,
            round=max(before.round + 1, int(now)),  # new, also when the rounds before are forgotten
            until=now + ROUND,
            moves=moves,
            wants=wanted.nodes,
        )
    is_growing = any(active_for(served[address], now) < policy.slow_start for address in joined)
    is_unsure = any(s.least < s.most for s in standing.values())
    # What nobody can be asked for now may be there in a moment: it is no end, and would be a new beginning.
    if is_growing or is_unsure or wanted.sessions:
        return before
    return _over(before, "the nodes that joined have their share", now)


def _upsets(past: NodePlan, planned: NodePlan | None) -> bool:
    """Whether what has become of a node makes the shares of all others than they were."""
    return past.state is State.ACTIVE and (planned is None or planned.node.weight != past.node.weight)


def _over(before: Rebalance, why: str, now: float) -> Rebalance:
    return before if before.since is None else replace(_withdrawn(before, now), since=None, reason=why)


def _withdrawn(before: Rebalance, now: float) -> Rebalance:
    if not before.moves:
        return before
    return replace(before, moves=NOTHING, wants=(), until=min(before.until, now))


# --- who wants sessions ------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    sessions: int
    nodes: tuple[str, ...]
    reason: str  # for whose sake, as a sentence


def _wanted(standing: Mapping[str, Standing], joined: Sequence[str], *, is_under_way: bool) -> _Wanted:
    """What nodes that have joined lack. Noise is no reason to begin; what has begun is brought to its end."""
    lacking = {
        address: standing[address]
        for address in joined
        if whole(standing[address].lack) >= 1
        and (
            standing[address].lack >= _LITTLE * standing[address].least_share
            or (is_under_way and standing[address].lack >= _FEW)
        )
    }
    each = [
        f"{address} has {s.most} of the {s.least_share:.0f} sessions that are its share"
        for address, s in lacking.items()
    ]
    return _Wanted(sum(whole(s.lack) for s in lacking.values()), tuple(lacking), "; ".join(each))


# --- who gives how many ------------------------------------------------------------------------------------


def _givers(
    served: Mapping[str, NodePlan], before: Rebalance, facts: Facts, policy: Policy, now: float
) -> list[Census] | None:
    """Envoys that can be asked for sessions; None until each has told what came of the last round.

    One that has fallen silent is not waited for. One that does not say which process it is cannot be asked.
    """
    settled = before.until + policy.move_limit + occupancy.COUNTED
    recent = occupancy.recent(policy, now)
    telling = [c for c in facts.censuses.values() if c.has_served and c.at >= recent]
    if any(census.began < settled or not served.keys() <= census.covered for census in telling):
        return None
    return [census for census in telling if census.instance]


def _split(most: int, standing: Mapping[str, Standing], givers: Sequence[Census]) -> Moves:
    """At most `most` sessions: of the nodes by their surplus, of a node by what its Envoys have there."""
    there = {
        address: {census.instance: census.sessions.get(address, 0) for census in givers}
        for address, each in standing.items()
        if each.surplus > 0
    }
    able = {a: min(standing[a].surplus, sum(counts.values())) for a, counts in there.items()}
    return MappingProxyType(
        {
            address: MappingProxyType(apportion(count, there[address]))
            for address, count in apportion(most, able).items()
        }
    )

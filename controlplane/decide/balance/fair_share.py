"""What nodes in service have of all sessions, and what their share is, in whole numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from controlplane.decide import session_counts
from controlplane.decide.balance import resource_factors
from controlplane.decide.balance.water_filling import ramp, surface
from controlplane.model.facts import Facts
from controlplane.model.plan import NodePlan, Policy
from controlplane.model.traffic import Census


class Standing(NamedTuple):
    """A node's sessions and its share of all.

    The sessions of an Envoy that has fallen silent may be over, or not. So there are two numbers of each; the
    least is without them.
    """

    least: int
    most: int
    least_share: int
    most_share: int

    @property
    def surplus(self) -> int:
        """Sessions that surely are more than its share; 0 or less when none are."""
        return self.least - self.most_share

    @property
    def lack(self) -> int:
        """Sessions that surely are missing to its share; 0 or less when none are."""
        return self.least_share - self.most


def standings(
    served: Mapping[str, NodePlan],
    capacities: Mapping[str, float],
    unasked: Collection[Census],
    facts: Facts,
    policy: Policy,
    now: float,
) -> dict[str, Standing]:
    """How those nodes stand that have `capacities`: they share their sessions among them.

    Shares go by capacity (0: it is to have none), and no node's is less than the sessions on it that nobody
    can be asked to move: those of direct clients, of Envoys without a module, and of `unasked` modules.
    """
    fresh_from = session_counts.counted_from(policy, now)
    movable = _less(facts.counted, [census.sessions for census in unasked])
    silent = session_counts.silent(facts, session_counts.recent(policy, now))
    least: list[int] = []
    most: list[int] = []
    for address in capacities:
        endpoint = served[address].endpoint
        count = session_counts.of_tidb(address, facts, fresh_from)
        if count is None:
            count = session_counts.known(address, endpoint, facts)
            least.append(
                count - session_counts.of_envoys(silent, address, endpoint, facts) if silent else count
            )
        else:
            least.append(count)
        most.append(count)
    widths = list(capacities.values())
    fixed = [max(0, n - movable.get(a, 0)) for a, n in zip(capacities, most, strict=True)]
    most_shares = least_shares = whole_shares(widths, fixed, most)
    if least != most:
        fixed = [max(0, n - movable.get(a, 0)) for a, n in zip(capacities, least, strict=True)]
        least_shares = whole_shares(widths, fixed, least)
    each = zip(capacities, map(Standing, least, most, least_shares, most_shares), strict=True)
    return dict(each)


def _less(counts: Mapping[str, int], taken: Collection[Mapping[str, int]]) -> Mapping[str, int]:
    if not taken:
        return counts
    left = dict(counts)
    for each in taken:
        for address, count in each.items():
            left[address] = left.get(address, 0) - count
    return left


def capacity(planned: NodePlan, policy: Policy, now: float) -> float:
    """What a node's share goes by: its weight, as far as it has grown, less what its vital signs take."""
    return planned.node.weight * part(planned, policy, now)


def part(planned: NodePlan, policy: Policy, now: float) -> float:
    """What slow start and its vital signs leave of a node's weight: above 0, at most 1."""
    since = planned.active_since
    grown = 1.0
    if since is not None and now - since < policy.slow_start:
        grown = ramp(now - since, policy.slow_start)
    return grown * resource_factors.share(planned.factors) if planned.factors else grown


def whole_shares(
    capacities: Sequence[float], fixed: Sequence[int], has: Sequence[int], more: int = 0
) -> list[int]:
    """All that they have, and `more` that come, shared out by capacity in whole numbers.

    None gets less than what is fixed there. What rounding leaves over goes to those nearest to one more; of
    equal ones, to those that have most now, so that nothing has to move for it. A capacity of 0 gets nothing
    but what is fixed.
    """
    total = sum(has) + more
    open_for = [i for i, each in enumerate(capacities) if each > 0]
    shares = [float(each) for each in fixed]
    poured = total - sum(fixed)
    if open_for and poured > 0:
        widths = [capacities[i] for i in open_for]
        level = surface(widths, [fixed[i] for i in open_for], poured)
        for i in open_for:
            shares[i] = max(shares[i], level * capacities[i])
    # What arithmetic has lost of a whole one is made up for.
    shares = [round(share, 6) for share in shares]
    whole = [math.floor(share) for share in shares]
    if (over := total - sum(whole)) > 0:
        for i in sorted(open_for, key=lambda i: (whole[i] - shares[i], -has[i], i))[:over]:
            whole[i] += 1
    return whole

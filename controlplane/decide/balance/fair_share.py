"""What nodes in service have of all sessions, and what their share is, in whole numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from controlplane.decide import session_counts
from controlplane.decide.balance import resource_factors
from controlplane.decide.balance.water_filling import ramp, water_level
from controlplane.model.facts import Facts
from controlplane.model.plan import NodePlan, Policy
from controlplane.model.traffic import SessionCounts


class LoadStatus(NamedTuple):
    """A node's sessions and its share of all.

    The sessions of an Envoy that has fallen silent may be over, or not. So there are two numbers of each; the
    least is without them.
    """

    min_sessions: int
    max_sessions: int
    min_share: int
    max_share: int

    @property
    def surplus(self) -> int:
        """Sessions that surely are more than its share; 0 or less when none are."""
        return self.min_sessions - self.max_share

    @property
    def deficit(self) -> int:
        """Sessions that surely are missing to its share; 0 or less when none are."""
        return self.min_share - self.max_sessions


def load_statuses(
    served: Mapping[str, NodePlan],
    capacities: Mapping[str, float],
    incapable: Collection[SessionCounts],
    facts: Facts,
    policy: Policy,
    now: float,
) -> dict[str, LoadStatus]:
    """How those nodes stand that have `capacities`: they share their sessions among them.

    Shares go by capacity (0: it is to have none), and no node's is less than the sessions on it that nobody
    can be asked to move: those of direct clients, of Envoys without a module, and of `unasked` modules.
    """
    fresh_from = session_counts.tidb_count_stale_before(policy, now)
    movable = _subtract(facts.sessions_by_address, [census.sessions for census in incapable])
    silent_envoys = session_counts.silent_envoys(facts, session_counts.report_stale_before(policy, now))
    min_counts: list[int] = []
    max_counts: list[int] = []
    for address in capacities:
        endpoint = served[address].endpoint
        count = session_counts.tidb_count(address, facts, fresh_from)
        if count is None:
            count = session_counts.reported(address, endpoint, facts)
            min_counts.append(
                count - session_counts.for_envoys(silent_envoys, address, endpoint, facts)
                if silent_envoys
                else count
            )
        else:
            min_counts.append(count)
        max_counts.append(count)
    capacity_values = list(capacities.values())
    immovable = [max(0, n - movable.get(a, 0)) for a, n in zip(capacities, max_counts, strict=True)]
    max_shares = min_shares = integer_shares(capacity_values, immovable, max_counts)
    if min_counts != max_counts:
        immovable = [max(0, n - movable.get(a, 0)) for a, n in zip(capacities, min_counts, strict=True)]
        min_shares = integer_shares(capacity_values, immovable, min_counts)
    each = zip(capacities, map(LoadStatus, min_counts, max_counts, min_shares, max_shares), strict=True)
    return dict(each)


def _subtract(counts: Mapping[str, int], subtracted: Collection[Mapping[str, int]]) -> Mapping[str, int]:
    if not subtracted:
        return counts
    left = dict(counts)
    for each in subtracted:
        for address, count in each.items():
            left[address] = left.get(address, 0) - count
    return left


def effective_capacity(planned: NodePlan, policy: Policy, now: float) -> float:
    """What a node's share goes by: its weight, as far as it has grown, less what its vital signs take."""
    return planned.node.weight * capacity_factor(planned, policy, now)


def capacity_factor(planned: NodePlan, policy: Policy, now: float) -> float:
    """What slow start and its vital signs leave of a node's weight: above 0, at most 1."""
    since = planned.active_since
    ramp_factor = 1.0
    if since is not None and now - since < policy.slow_start:
        ramp_factor = ramp(now - since, policy.slow_start)
    return ramp_factor * resource_factors.combined_share(planned.factors) if planned.factors else ramp_factor


def integer_shares(
    capacities: Sequence[float], immovable: Sequence[int], current: Sequence[int], added: int = 0
) -> list[int]:
    """All that they have, and `more` that come, shared out by capacity in whole numbers.

    None gets less than what is fixed there. What rounding leaves over goes to those nearest to one more; of
    equal ones, to those that have most now, so that nothing has to move for it. A capacity of 0 gets nothing
    but what is fixed.
    """
    total = sum(current) + added
    receivers = [i for i, each in enumerate(capacities) if each > 0]
    shares = [float(each) for each in immovable]
    incoming = total - sum(immovable)
    if receivers and incoming > 0:
        receiver_capacities = [capacities[i] for i in receivers]
        level = water_level(receiver_capacities, [immovable[i] for i in receivers], incoming)
        for i in receivers:
            shares[i] = max(shares[i], level * capacities[i])
    # What arithmetic has lost of a whole one is made up for.
    shares = [round(share, 6) for share in shares]
    floors = [math.floor(share) for share in shares]
    if (leftover := total - sum(floors)) > 0:
        for i in sorted(receivers, key=lambda i: (floors[i] - shares[i], -current[i], i))[:leftover]:
            floors[i] += 1
    return floors

"""Compute each node's fair share of the sessions in whole numbers, and compare with its sessions. No I/O."""

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
    """A node's sessions and its fair share.

    The sessions of an Envoy that stopped reporting may have ended or not, so both values have a minimum
    (without those sessions) and a maximum.
    """

    min_sessions: int
    max_sessions: int
    min_share: int
    max_share: int

    @property
    def surplus(self) -> int:
        """Lower bound of the sessions above its fair share; 0 or less when there are none."""
        return self.min_sessions - self.max_share

    @property
    def deficit(self) -> int:
        """Lower bound of the sessions it is below its fair share; 0 or less when there are none."""
        return self.min_share - self.max_sessions


def load_statuses(
    served: Mapping[str, NodePlan],
    capacities: Mapping[str, float],
    incapable: Collection[SessionCounts],
    facts: Facts,
    policy: Policy,
    now: float,
) -> dict[str, LoadStatus]:
    """Return the load status of each node in `capacities`, which share their sessions among each other.

    Shares are proportional to capacity (0: no share). A node's share is at least its immovable sessions:
    those of direct clients, of Envoys without a module, and of the `incapable` modules.
    """
    fresh_from = session_counts.tidb_count_stale_before(policy, now)
    movable = _subtract(facts.sessions_by_address, [counts.sessions for counts in incapable])
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
    statuses = map(LoadStatus, min_counts, max_counts, min_shares, max_shares)
    return dict(zip(capacities, statuses, strict=True))


def _subtract(counts: Mapping[str, int], subtracted: Collection[Mapping[str, int]]) -> Mapping[str, int]:
    if not subtracted:
        return counts
    difference = dict(counts)
    for mapping in subtracted:
        for address, count in mapping.items():
            difference[address] = difference.get(address, 0) - count
    return difference


def effective_capacity(planned: NodePlan, policy: Policy, now: float) -> float:
    """Return a node's weight, scaled by slow start and its resource factors."""
    return planned.node.weight * capacity_factor(planned, policy, now)


def capacity_factor(planned: NodePlan, policy: Policy, now: float) -> float:
    """Return the part of a node's weight after slow start and its resource factors: above 0, at most 1."""
    since = planned.active_since
    ramp_factor = 1.0
    if since is not None and now - since < policy.slow_start:
        ramp_factor = ramp(now - since, policy.slow_start)
    return ramp_factor * resource_factors.combined_share(planned.factors) if planned.factors else ramp_factor


def integer_shares(
    capacities: Sequence[float], immovable: Sequence[int], current: Sequence[int], added: int = 0
) -> list[int]:
    """Divide the `current` sessions of all nodes and `added` new ones by capacity in whole numbers.

    No node gets less than its `immovable` sessions, and a node of capacity 0 gets just these. The remainder
    of rounding goes to the largest fractions, on ties to the nodes with the most sessions, so that nothing
    has to migrate for it.
    """
    total = sum(current) + added
    receivers = [i for i, capacity in enumerate(capacities) if capacity > 0]
    shares = [float(count) for count in immovable]
    incoming = total - sum(immovable)
    if receivers and incoming > 0:
        receiver_capacities = [capacities[i] for i in receivers]
        level = water_level(receiver_capacities, [immovable[i] for i in receivers], incoming)
        for i in receivers:
            shares[i] = max(shares[i], level * capacities[i])
    # Rounding compensates for floating-point errors just below a whole number.
    shares = [round(share, 6) for share in shares]
    whole_shares = [math.floor(share) for share in shares]
    if (leftover := total - sum(whole_shares)) > 0:
        for i in sorted(receivers, key=lambda i: (whole_shares[i] - shares[i], -current[i], i))[:leftover]:
            whole_shares[i] += 1
    return whole_shares

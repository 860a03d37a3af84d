"""Sessions that go back to the zone of their Envoys, once that has room for them again. Pure.

Envoys keep to the nodes of their zone, but not while these are full or away. What they have sent elsewhere in
that time would stay there, for as long as its clients do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from controlplane.decide.balance.balancing_groups import BalancingGroup
from controlplane.decide.balance.fair_share import LoadStatus, integer_shares
from controlplane.decide.balance.migration_batch import (
    MigrationBatch,
    NodeEnvoyCounts,
    assign_to_envoys,
    max_batch_size,
)
from controlplane.model.plan import BalancePolicy, NodePlan, Policy
from controlplane.model.traffic import SessionCounts


def plan_zone_return(
    balancing_group: BalancingGroup,
    statuses: Mapping[str, LoadStatus],
    served: Mapping[str, NodePlan],
    load_per_capacity: float,
    capable: Mapping[str, SessionCounts],
    zone_by_envoy: Mapping[str, str],
    policy: Policy,
    rotation: int,
) -> MigrationBatch | None:
    """What is to go back to the nodes of a zone; None when nothing is elsewhere, or there is no room.

    `sharers` are these nodes, `standing` is how they stand; `asked` and `zones` are by Envoy. By place and
    load there is room up to `level`, the sessions of the whole group for each unit of its capacity: below
    that no zone is ever full.
    """
    count = max_batch_size(policy)
    if policy.balance_policy is not BalancePolicy.LOCATION:
        max_here = math.floor(load_per_capacity * sum(balancing_group.capacities.values()))
        count = min(count, max_here - sum(each.max_sessions for each in statuses.values()))
    if count < 1:
        return None
    elsewhere = {
        a for a, p in served.items() if p.group == balancing_group.group and p.zone != balancing_group.zone
    }
    envoys = [census for envoy, census in capable.items() if zone_by_envoy.get(envoy) == balancing_group.zone]
    first = rotation % len(envoys) if envoys else 0
    outgoing = _select_outgoing(count, envoys[first:] + envoys[:first], elsewhere)
    if not outgoing:
        return None
    count = sum(sum(counts.values()) for counts in outgoing.values())
    current = [each.max_sessions for each in statuses.values()]
    shares = integer_shares(list(balancing_group.capacities.values()), current, current, added=count)
    targets = {a: n - h for a, n, h in zip(statuses, shares, current, strict=True) if n > h}
    reason = f"Envoys of zone {balancing_group.zone} have sessions elsewhere, and it has room for them"
    return MigrationBatch(balancing_group.group, outgoing, assign_to_envoys(outgoing, targets), count, reason)


def _select_outgoing(
    count: int, envoys: Sequence[SessionCounts], elsewhere: Collection[str]
) -> NodeEnvoyCounts:
    """So many sessions from these nodes, or all there are; from one Envoy after the other."""
    outgoing: dict[str, dict[str, int]] = {}
    left = count
    for census in envoys:
        if not left:
            break
        for address in sorted(census.sessions.keys() & elsewhere):
            if part := min(left, census.sessions[address]):
                outgoing.setdefault(address, {})[census.instance] = part
                left -= part
    return MappingProxyType({address: MappingProxyType(counts) for address, counts in outgoing.items()})

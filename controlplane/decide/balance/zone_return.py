"""Return sessions to the zone of their Envoys once that zone has capacity again. No I/O.

Envoys use the nodes of their zone, except while these are overloaded or out of service. Without migration,
sessions that went to other zones in the meantime would stay there until their clients disconnect.
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
    """Return the migrations back to the nodes of a zone; None if there are none or the zone has no room.

    `balancing_group` holds the nodes of the zone, `statuses` their load. With policy `resource` the zone has
    room up to `load_per_capacity`, the sessions per capacity of the whole group: below that no zone is
    overloaded.
    """
    count = max_batch_size(policy)
    if policy.balance_policy is not BalancePolicy.LOCATION:
        max_here = math.floor(load_per_capacity * sum(balancing_group.capacities.values()))
        count = min(count, max_here - sum(status.max_sessions for status in statuses.values()))
    if count < 1:
        return None
    elsewhere = {
        a for a, p in served.items() if p.group == balancing_group.group and p.zone != balancing_group.zone
    }
    envoys = [counts for envoy, counts in capable.items() if zone_by_envoy.get(envoy) == balancing_group.zone]
    first = rotation % len(envoys) if envoys else 0
    outgoing = _select_outgoing(count, envoys[first:] + envoys[:first], elsewhere)
    if not outgoing:
        return None
    count = sum(sum(counts.values()) for counts in outgoing.values())
    current = [status.max_sessions for status in statuses.values()]
    shares = integer_shares(list(balancing_group.capacities.values()), current, current, added=count)
    targets = {a: n - c for a, n, c in zip(statuses, shares, current, strict=True) if n > c}
    reason = f"zone {balancing_group.zone} has capacity again for its Envoys' sessions in other zones"
    return MigrationBatch(balancing_group.group, outgoing, assign_to_envoys(outgoing, targets), count, reason)


def _select_outgoing(
    count: int, envoys: Sequence[SessionCounts], elsewhere: Collection[str]
) -> NodeEnvoyCounts:
    """Return up to `count` sessions on the `elsewhere` nodes, taken from one Envoy after the other."""
    outgoing: dict[str, dict[str, int]] = {}
    remaining = count
    for envoy in envoys:
        if not remaining:
            break
        for address in sorted(envoy.sessions.keys() & elsewhere):
            if part := min(remaining, envoy.sessions[address]):
                outgoing.setdefault(address, {})[envoy.instance] = part
                remaining -= part
    return MappingProxyType({address: MappingProxyType(counts) for address, counts in outgoing.items()})

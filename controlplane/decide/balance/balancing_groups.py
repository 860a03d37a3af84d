"""Which nodes share their sessions: those of a group or, where Envoys keep to it, of a zone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from controlplane.decide.balance import locality
from controlplane.decide.balance.fair_share import effective_capacity
from controlplane.model.nodes import GroupZone
from controlplane.model.plan import NodePlan, Policy


class BalancingGroup(NamedTuple):
    """Nodes by address, with the capacity that each one's share goes by; 0: it only stands in for others."""

    group: str
    zone: str  # empty: those that no Envoy keeps to
    capacities: Mapping[str, float]


def balancing_groups(
    served: Mapping[str, NodePlan],
    overloaded: Collection[GroupZone],
    zone_by_envoy: Mapping[str, str],
    policy: Policy,
    now: float,
) -> list[BalancingGroup]:
    """All nodes in service. `full` zones' Envoys use nodes elsewhere, too; `zones` says where Envoys are."""
    envoy_zones, serving = locality.envoy_zones(zone_by_envoy, policy), locality.serving_addresses(served)
    capacities_by_zone: dict[GroupZone, dict[str, float]] = {}
    backups: dict[str, list[str]] = {}
    for address, planned in served.items():
        if address not in serving:
            backups.setdefault(planned.group, []).append(address)
            continue
        is_zone_local = planned.zone in envoy_zones and (planned.group, planned.zone) not in overloaded
        quarter = (planned.group, planned.zone if is_zone_local else "")
        capacities_by_zone.setdefault(quarter, {})[address] = effective_capacity(planned, policy, now)
    for group, addresses in backups.items():
        # Those that have stood in give what they have to any that serve again.
        first = min(group_zone for group_zone in capacities_by_zone if group_zone[0] == group)
        capacities_by_zone[first].update(dict.fromkeys(addresses, 0.0))
    return [
        BalancingGroup(group, zone, capacities)
        for (group, zone), capacities in sorted(capacities_by_zone.items())
    ]

"""Divide the nodes in service into balancing groups: node groups or, with zones, parts of them. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from controlplane.decide.balance import locality
from controlplane.decide.balance.fair_share import effective_capacity
from controlplane.model.nodes import GroupZone
from controlplane.model.plan import NodePlan, Policy


class BalancingGroup(NamedTuple):
    """Nodes that share their sessions, by address, with their effective capacity (0: an unused backup)."""

    group: str
    zone: str  # empty: nodes outside the zones that Envoys are limited to
    capacities: Mapping[str, float]


def balancing_groups(
    served: Mapping[str, NodePlan],
    overloaded: Collection[GroupZone],
    zone_by_envoy: Mapping[str, str],
    policy: Policy,
    now: float,
) -> list[BalancingGroup]:
    """Return the balancing groups of all nodes in service. Envoys of `overloaded` zones use all zones."""
    envoy_zones, serving = locality.envoy_zones(zone_by_envoy, policy), locality.serving_addresses(served)
    capacities_by_zone: dict[GroupZone, dict[str, float]] = {}
    backups: dict[str, list[str]] = {}
    for address, planned in served.items():
        if address not in serving:
            backups.setdefault(planned.group, []).append(address)
            continue
        is_zone_local = planned.zone in envoy_zones and (planned.group, planned.zone) not in overloaded
        group_zone = (planned.group, planned.zone if is_zone_local else "")
        capacities_by_zone.setdefault(group_zone, {})[address] = effective_capacity(planned, policy, now)
    for group, addresses in backups.items():
        # Backup nodes that were in use hand their sessions to the nodes that serve again.
        first = min(key for key in capacities_by_zone if key[0] == group)
        capacities_by_zone[first].update(dict.fromkeys(addresses, 0.0))
    return [
        BalancingGroup(group, zone, capacities)
        for (group, zone), capacities in sorted(capacities_by_zone.items())
    ]

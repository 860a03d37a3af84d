"""Node groups, backup nodes and zones: which nodes serve which Envoys. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controlplane.model.nodes import GroupZone, Node
from controlplane.model.plan import BalancePolicy, NodePlan, Policy

# Few sessions are always spread unevenly: a zone is not overloaded unless it exceeds its share by this many.
_MIN_EXCESS_SESSIONS = 4.0


def classify(node: Node, policy: Policy) -> tuple[str, bool, str]:
    """Return the group of a node, whether it is a backup, and its zone; both names may be empty."""
    labels = node.labels
    group = ""
    if policy.groups:  # most fleets have none
        group = next((g.name for g in policy.groups if _has_labels(labels, g.labels)), "")
    backup = bool(policy.backup_labels) and _has_labels(labels, policy.backup_labels)
    return group, backup, labels.get(policy.zone_label, "")


def serving_by_group(served: Mapping[str, NodePlan]) -> dict[str, list[str]]:
    """Return the nodes in service that receive sessions, by group.

    Backup nodes receive sessions only if no other node of their group is in service.
    """
    primaries: dict[str, list[str]] = {}
    backups: dict[str, list[str]] = {}
    for address, planned in served.items():
        (backups if planned.backup else primaries).setdefault(planned.group, []).append(address)
    return backups | primaries


def serving_addresses(served: Mapping[str, NodePlan]) -> set[str]:
    """Return the nodes in service that receive sessions, over all groups."""
    return {address for addresses in serving_by_group(served).values() for address in addresses}


def envoy_zones(zone_by_envoy: Mapping[str, str], policy: Policy) -> set[str]:
    """Return the zones with Envoys that prefer nodes of their zone. `zone_by_envoy` has all Envoys."""
    if policy.balance_policy is BalancePolicy.CONNECTION:
        return set()
    return {zone for zone in zone_by_envoy.values() if zone}


def overloaded_zones(
    served: Mapping[str, NodePlan],
    sessions: Mapping[str, int],
    capacities: Mapping[str, float],
    previous: Collection[GroupZone],
    policy: Policy,
    zone_by_envoy: Mapping[str, str],
) -> frozenset[GroupZone]:
    """Return the groups and zones whose Envoys also use nodes in other zones.

    `served` are the nodes in service; `sessions` holds their session counts as far as known. A zone becomes
    overloaded at `zone_overload_ratio` times the load of its group. It stays so until its load is halfway
    down to that of the group, so that the sessions it sends elsewhere do not end the overload at once.
    """
    zones_with_envoys = envoy_zones(zone_by_envoy, policy)
    # With policy `location`, a zone that has a node is never overloaded.
    if not zones_with_envoys or policy.balance_policy is BalancePolicy.LOCATION:
        return frozenset()
    overloaded: set[GroupZone] = set()
    for group, addresses in serving_by_group(served).items():
        sums = _sum_by_zone([a for a in addresses if a in sessions], served, sessions, capacities)
        capacity = sum(zone_capacity for zone_capacity, _ in sums.values())
        if not capacity:
            continue
        load_per_capacity = sum(count for _, count in sums.values()) / capacity
        for zone in zones_with_envoys & sums.keys():
            group_zone = (group, zone)
            zone_capacity, count = sums[zone]
            if _is_overloaded(
                count, load_per_capacity * zone_capacity, group_zone in previous, policy.zone_overload_ratio
            ):
                overloaded.add(group_zone)
    return frozenset(overloaded)


def _is_overloaded(sessions: int, share: float, was_overloaded: bool, overload_ratio: float) -> bool:
    if was_overloaded:
        return sessions > share * (1 + overload_ratio) / 2
    return sessions > share * overload_ratio and sessions >= share + _MIN_EXCESS_SESSIONS


def _sum_by_zone(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    sessions: Mapping[str, int],
    capacities: Mapping[str, float],
) -> dict[str, tuple[float, int]]:
    """Return the total capacity and sessions of the nodes, by zone."""
    sums: dict[str, tuple[float, int]] = {}
    for address in addresses:
        zone = served[address].zone
        capacity, count = sums.get(zone, (0.0, 0))
        sums[zone] = (capacity + capacities[address], count + sessions[address])
    return sums


def _has_labels(labels: Mapping[str, str], required: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in required.items())

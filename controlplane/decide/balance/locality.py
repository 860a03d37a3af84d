"""Which nodes share which sessions: groups, nodes that stand in, and zones that have enough. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controlplane.model.nodes import GroupZone, Node
from controlplane.model.plan import BalancePolicy, NodePlan, Policy

# A zone of few sessions is uneven by nature: it is not full before it has so many more than its share.
_MIN_EXCESS_SESSIONS = 4.0


def classify(node: Node, policy: Policy) -> tuple[str, bool, str]:
    """The group of a node, whether it only stands in, and its zone; both names may be empty."""
    labels = node.labels
    group = ""
    if policy.groups:  # most fleets have none
        group = next((each.name for each in policy.groups if _has_labels(labels, each.labels)), "")
    backup = bool(policy.backup_labels) and _has_labels(labels, policy.backup_labels)
    return group, backup, labels.get(policy.zone_label, "")


def serving_by_group(served: Mapping[str, NodePlan]) -> dict[str, list[str]]:
    """Of the nodes in service, those that take sessions now, by group.

    Nodes that stand in take some only where no other node of their group is in service.
    """
    primaries: dict[str, list[str]] = {}
    backups: dict[str, list[str]] = {}
    for address, planned in served.items():
        (backups if planned.backup else primaries).setdefault(planned.group, []).append(address)
    return backups | primaries


def serving_addresses(served: Mapping[str, NodePlan]) -> set[str]:
    """The same of all groups."""
    return {address for addresses in serving_by_group(served).values() for address in addresses}


def envoy_zones(zone_by_envoy: Mapping[str, str], policy: Policy) -> set[str]:
    """Where Envoys are that ask where nodes are; `zones` are those of all Envoys."""
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
    """The groups and zones whose Envoys are to use nodes elsewhere, too.

    `served` are the nodes in service; `sessions` has those of a node, as far as they are known; `zones` says
    where each Envoy is. A zone is full from `spill` times
    the load of its group, until it is down to midway between that and the load of all, so that sessions which
    it sends elsewhere do not make it seem to have room at once.
    """
    zones_with_envoys = envoy_zones(zone_by_envoy, policy)
    # By place alone, no zone is full that has a node.
    if not zones_with_envoys or policy.balance_policy is BalancePolicy.LOCATION:
        return frozenset()
    found: set[GroupZone] = set()
    for group, addresses in serving_by_group(served).items():
        sums = _sum_by_zone([a for a in addresses if a in sessions], served, sessions, capacities)
        capacity = sum(width for width, _ in sums.values())
        if not capacity:
            continue
        load_per_capacity = sum(count for _, count in sums.values()) / capacity
        for zone in zones_with_envoys & sums.keys():
            group_zone = (group, zone)
            zone_capacity, count = sums[zone]
            if _is_overloaded(
                count, load_per_capacity * zone_capacity, group_zone in previous, policy.zone_overload_ratio
            ):
                found.add(group_zone)
    return frozenset(found)


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
    """Capacity and sessions of these nodes, by zone."""
    sums: dict[str, tuple[float, int]] = {}
    for address in addresses:
        zone = served[address].zone
        capacity, count = sums.get(zone, (0.0, 0))
        sums[zone] = (capacity + capacities[address], count + sessions[address])
    return sums


def _has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())

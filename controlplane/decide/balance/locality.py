"""Which nodes share which sessions: groups, nodes that stand in, and zones that have enough. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from controlplane.model.nodes import Node, Quarter
from controlplane.model.plan import NodePlan, Policy, Strategy

# A zone of few sessions is uneven by nature: it is not full before it has so many more than its share.
_A_FEW = 4.0


def place(node: Node, policy: Policy) -> tuple[str, bool, str]:
    """The group of a node, whether it only stands in, and its zone; both names may be empty."""
    labels = node.labels
    group = ""
    if policy.groups:  # most fleets have none
        group = next((each.name for each in policy.groups if _has(labels, each.labels)), "")
    backup = bool(policy.backup) and _has(labels, policy.backup)
    return group, backup, labels.get(policy.zone_label, "")


def pools(served: Mapping[str, NodePlan]) -> dict[str, list[str]]:
    """Of the nodes in service, those that take sessions now, by group.

    Nodes that stand in take some only where no other node of their group is in service.
    """
    regular: dict[str, list[str]] = {}
    standing_in: dict[str, list[str]] = {}
    for address, planned in served.items():
        (standing_in if planned.backup else regular).setdefault(planned.group, []).append(address)
    return standing_in | regular


def taking(served: Mapping[str, NodePlan]) -> set[str]:
    """The same of all groups."""
    return {address for addresses in pools(served).values() for address in addresses}


def homes(zones: Mapping[str, str], policy: Policy) -> set[str]:
    """Where Envoys are that ask where nodes are; `zones` are those of all Envoys."""
    if policy.strategy is Strategy.CONNECTION:
        return set()
    return {zone for zone in zones.values() if zone}


def full(
    served: Mapping[str, NodePlan],
    sessions: Mapping[str, int],
    capacities: Mapping[str, float],
    previous: Collection[Quarter],
    policy: Policy,
    zones: Mapping[str, str],
) -> frozenset[Quarter]:
    """The groups and zones whose Envoys are to use nodes elsewhere, too.

    `served` are the nodes in service; `sessions` has those of a node, as far as they are known; `zones` says
    where each Envoy is. A zone is full from `spill` times
    the load of its group, until it is down to midway between that and the load of all, so that sessions which
    it sends elsewhere do not make it seem to have room at once.
    """
    there = homes(zones, policy)
    # By place alone, no zone is full that has a node.
    if not there or policy.strategy is Strategy.LOCATION:
        return frozenset()
    found: set[Quarter] = set()
    for group, addresses in pools(served).items():
        sums = _by_zone([a for a in addresses if a in sessions], served, sessions, capacities)
        capacity = sum(width for width, _ in sums.values())
        if not capacity:
            continue
        level = sum(count for _, count in sums.values()) / capacity
        for zone in there & sums.keys():
            quarter = (group, zone)
            width, count = sums[zone]
            if _is_full(count, level * width, quarter in previous, policy.spill):
                found.add(quarter)
    return frozenset(found)


def _is_full(sessions: int, share: float, was: bool, spill: float) -> bool:
    if was:
        return sessions > share * (1 + spill) / 2
    return sessions > share * spill and sessions >= share + _A_FEW


def _by_zone(
    addresses: Collection[str],
    served: Mapping[str, NodePlan],
    sessions: Mapping[str, int],
    capacities: Mapping[str, float],
) -> dict[str, tuple[float, int]]:
    """Capacity and sessions of these nodes, by zone."""
    sums: dict[str, tuple[float, int]] = {}
    for address in addresses:
        zone = served[address].zone
        width, count = sums.get(zone, (0.0, 0))
        sums[zone] = (width + capacities[address], count + sessions[address])
    return sums


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())

"""Decide which nodes receive sessions from which Envoys: node groups, backup nodes and zones. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from controlplane.model.nodes import GroupZone, Node
from controlplane.model.plan import BalancePolicy, NodePlan, Policy

# A zone is overloaded only if it exceeds its share by this many sessions: few sessions rarely divide evenly.
_MIN_EXCESS_SESSIONS = 4.0


def classify(node: Node, policy: Policy) -> tuple[str, bool, str]:
    """Return a node's group (empty: none), whether the node is a backup, and its zone (empty: unknown)."""
    labels = node.labels
    group = ""
    if policy.groups:
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
    """Return the nodes of all groups that receive sessions."""
    return {address for addresses in serving_by_group(served).values() for address in addresses}


def envoy_zones(zone_by_envoy: Mapping[str, str], policy: Policy) -> set[str]:
    """Return the zones with Envoys that prefer local nodes."""
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
    """Return the pairs (group, zone) for which the Envoys of the zone also use nodes in other zones.

    `served` are the nodes in service, and `sessions` their known session counts. A zone becomes overloaded if
    its load is `zone_overload_ratio` times the load of its group. It stays overloaded until its load has
    dropped half way to the group's load; otherwise the first sessions in other zones would end the overload.
    """
    zones_with_envoys = envoy_zones(zone_by_envoy, policy)
    # With policy `location`, a zone that has a node is never overloaded.
    if not zones_with_envoys or policy.balance_policy is BalancePolicy.LOCATION:
        return frozenset()
    overloaded: set[GroupZone] = set()
    for group, addresses in serving_by_group(served).items():
        zone_capacities: dict[str, float] = defaultdict(float)
        zone_sessions: dict[str, int] = defaultdict(int)
        for address in addresses:
            if address in sessions:
                zone_capacities[served[address].zone] += capacities[address]
                zone_sessions[served[address].zone] += sessions[address]
        capacity = sum(zone_capacities.values())
        if not capacity:
            continue
        load_per_capacity = sum(zone_sessions.values()) / capacity
        for zone in zones_with_envoys & zone_sessions.keys():
            share, was_overloaded = load_per_capacity * zone_capacities[zone], (group, zone) in previous
            if _is_overloaded(zone_sessions[zone], share, was_overloaded, policy.zone_overload_ratio):
                overloaded.add((group, zone))
    return frozenset(overloaded)


def _is_overloaded(sessions: int, share: float, was_overloaded: bool, overload_ratio: float) -> bool:
    if was_overloaded:
        return sessions > share * (1 + overload_ratio) / 2
    return sessions > share * overload_ratio and sessions >= share + _MIN_EXCESS_SESSIONS


def _has_labels(labels: Mapping[str, str], required: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in required.items())

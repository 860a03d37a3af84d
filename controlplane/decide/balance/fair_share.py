"""Group the nodes among which sessions are distributed, and compute each node's fair share. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from controlplane.decide import session_counts
from controlplane.decide.balance import locality, resource_factors
from controlplane.decide.balance.water_filling import ramp, water_level
from controlplane.decide.inputs import Inputs
from controlplane.model.nodes import GroupZone
from controlplane.model.plan import NodePlan, Policy
from controlplane.model.traffic import SessionCounts


class LoadStatus(NamedTuple):
    """A node's sessions and its fair share.

    It is unknown whether the sessions of an Envoy that stopped reporting have ended. The minima exclude these
    sessions, the maxima include them.
    """

    min_sessions: int
    max_sessions: int
    min_share: int
    max_share: int

    @property
    def surplus(self) -> int:
        """If positive: the node has at least this many sessions more than its fair share."""
        return self.min_sessions - self.max_share

    @property
    def deficit(self) -> int:
        """If positive: the node has at least this many sessions fewer than its fair share."""
        return self.min_share - self.max_sessions


def load_statuses(
    served: Mapping[str, NodePlan],
    capacities: Mapping[str, float],
    incapable: Collection[SessionCounts],
    inputs: Inputs,
) -> dict[str, LoadStatus]:
    """Return the load status of each node in `capacities`, the nodes of one balancing group.

    Shares are proportional to capacity, but never below a node's immovable sessions: those of clients that
    bypass Envoy, of Envoys without Tidevoy's module, and of `incapable` modules, which migrate none.
    """
    facts, fresh_from = inputs.facts, inputs.tidb_counts_stale_before
    movable = Counter(facts.sessions_by_address)
    for counts in incapable:
        movable.subtract(counts.sessions)
    silent_envoys = session_counts.silent_envoys(facts, inputs.reports_stale_before)
    envoys_counted_from = session_counts.envoys_counted_from(facts, silent_envoys)
    min_counts: list[int] = []
    max_counts: list[int] = []
    for address in capacities:
        endpoint = served[address].endpoint
        max_count = session_counts.sessions_reported_by_envoys(address, endpoint, facts)
        min_count = max_count
        if silent_envoys:
            min_count -= session_counts.sessions_of_envoys_on_node(silent_envoys, address, endpoint, facts)
        if (own_count := session_counts.tidb_count(address, facts, fresh_from)) is not None:
            # The Envoys may report more sessions because these were opened after the server counted.
            is_older = (facts.health[address].connections_at or 0.0) < envoys_counted_from
            min_count = max_count = max(own_count, min_count) if is_older else own_count
        min_counts.append(min_count)
        max_counts.append(max_count)
    capacity_values = list(capacities.values())
    immovable = [max(0, n - movable[a]) for a, n in zip(capacities, max_counts, strict=True)]
    max_shares = min_shares = integer_shares(capacity_values, immovable, max_counts)
    if min_counts != max_counts:
        immovable = [max(0, n - movable[a]) for a, n in zip(capacities, min_counts, strict=True)]
        min_shares = integer_shares(capacity_values, immovable, min_counts)
    statuses = map(LoadStatus, min_counts, max_counts, min_shares, max_shares)
    return dict(zip(capacities, statuses, strict=True))


def effective_capacity(planned: NodePlan, policy: Policy, now: float) -> float:
    """Return a node's weight, scaled by slow start and its resource factors."""
    return planned.node.weight * capacity_factor(planned, policy, now)


def capacity_factor(planned: NodePlan, policy: Policy, now: float) -> float:
    """Return the factor of slow start times the node's resource factors: above 0, at most 1."""
    since = planned.active_since
    ramp_factor = 1.0
    if since is not None and now - since < policy.slow_start:
        ramp_factor = ramp(now - since, policy.slow_start)
    return ramp_factor * resource_factors.combined_share(planned.factors) if planned.factors else ramp_factor


def integer_shares(
    capacities: Sequence[float], immovable: Sequence[int], current: Sequence[int], added: int = 0
) -> list[int]:
    """Divide the `current` sessions of all nodes, and `added` new ones, in proportion to capacity.

    No node gets less than its `immovable` sessions, and a node of capacity 0 gets only these. The shares with
    the largest fractions are rounded up. On ties, the nodes with the most sessions come first, so that fewer
    sessions have to migrate.
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


class BalancingGroup(NamedTuple):
    """Nodes among which sessions are distributed. Rebalancing migrates sessions only within such a group."""

    group: str
    zone: str  # empty: nodes that no Envoy prefers, and nodes in overloaded zones
    capacities: Mapping[str, float]  # effective capacity by address; 0: an unused backup


def balancing_groups(
    served: Mapping[str, NodePlan],
    overloaded: Collection[GroupZone],
    zone_by_envoy: Mapping[str, str],
    policy: Policy,
    now: float,
) -> list[BalancingGroup]:
    """Return the balancing groups of all nodes in service. Envoys in `overloaded` zones use all zones."""
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
        # With capacity 0, a backup that was in use gives its sessions back to the other nodes.
        first = min(key for key in capacities_by_zone if key[0] == group)
        capacities_by_zone[first].update(dict.fromkeys(addresses, 0.0))
    return [
        BalancingGroup(group, zone, capacities)
        for (group, zone), capacities in sorted(capacities_by_zone.items())
    ]

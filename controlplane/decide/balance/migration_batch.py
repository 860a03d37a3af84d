"""Plan how many sessions migrate between the nodes of a balancing group, and through which Envoys. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from controlplane.decide.balance.apportion import apportion
from controlplane.decide.balance.fair_share import LoadStatus
from controlplane.model.plan import Policy
from controlplane.model.traffic import SessionCounts

# Longest duration of a round: a batch is limited to the sessions that may migrate in this time.
MAX_ROUND_SECONDS = 5.0
# A deficit is tolerated up to this multiple of a surplus: new sessions reduce it without migrations.
_DEFICIT_TOLERANCE_FACTOR = 2.0

NodeEnvoyCounts = Mapping[str, Mapping[str, int]]  # by address of a node, then by instance of an Envoy


class MigrationBatch(NamedTuple):
    """Sessions that migrate in one round: how many leave each node, and how many each node receives."""

    group: str
    outgoing: NodeEnvoyCounts
    incoming: NodeEnvoyCounts
    sessions: int  # total
    reason: str  # the cause, as a sentence


def plan_batch(
    group: str,
    statuses: Mapping[str, LoadStatus],
    noise_margins: Mapping[str, float],
    capable: Sequence[SessionCounts],
    policy: Policy,
    rotation: int,
) -> MigrationBatch | None:
    """Return the migrations of the next round, or None if none is worthwhile or no Envoy can perform any.

    `rotation` differs in each round, so that Envoys that migrated nothing are not asked again before others.

    Sessions migrate from the nodes that are furthest above their share to those furthest below. No node
    drops below its share by giving sessions away, nor exceeds it by receiving them.
    """
    surpluses = {a: s.surplus for a, s in statuses.items() if s.surplus > 0}
    deficits = {a: s.deficit for a, s in statuses.items() if s.deficit > 0}
    if not surpluses or not deficits:
        return None
    overloaded = {
        a: n for a, n in surpluses.items() if n > _tolerance(statuses[a].max_share, noise_margins[a], policy)
    }
    underloaded = {
        a: n
        for a, n in deficits.items()
        if n > _DEFICIT_TOLERANCE_FACTOR * _tolerance(statuses[a].min_share, noise_margins[a], policy)
    }
    requested = max(sum(overloaded.values()), sum(underloaded.values()))
    count = min(requested, sum(surpluses.values()), sum(deficits.values()), max_batch_size(policy))
    if not count:
        return None
    outgoing: dict[str, Mapping[str, int]] = {}
    remaining = count
    for address in _sorted_by_distance(surpluses, statuses):
        if not remaining:
            break  # of thousands of nodes a few suffice for one round
        sessions_by_envoy = {c.instance: n for c in capable if (n := c.sessions.get(address, 0))}
        if parts := apportion(min(remaining, surpluses[address]), sessions_by_envoy, rotation):
            outgoing[address] = MappingProxyType(parts)
            remaining -= sum(parts.values())
    if not outgoing:
        return None
    planned = count - remaining
    incoming = assign_to_envoys(outgoing, _fill_by_distance(planned, deficits, statuses))
    reason = _describe_reason(overloaded, underloaded, statuses)
    return MigrationBatch(group, MappingProxyType(outgoing), incoming, planned, reason)


def max_batch_size(policy: Policy) -> int:
    """Return the maximum number of sessions that migrate in one round."""
    return max(1, int(policy.rebalance_per_second * MAX_ROUND_SECONDS))


def _tolerance(share: int, noise_margin: float, policy: Policy) -> float:
    """Return by how many sessions a node may differ from its share."""
    return max(policy.rebalance_threshold * share, noise_margin)


def _fill_by_distance(
    count: int, limits: Mapping[str, int], statuses: Mapping[str, LoadStatus]
) -> dict[str, int]:
    """Distribute `count` sessions up to each node's limit, nodes furthest from their share first."""
    remaining, allotted = count, {}
    for address in _sorted_by_distance(limits, statuses):
        if part := min(remaining, limits[address]):
            allotted[address] = part
            remaining -= part
    return allotted


def _sorted_by_distance(deviations: Mapping[str, int], statuses: Mapping[str, LoadStatus]) -> list[str]:
    """Return the nodes by their deviation relative to their share, largest first."""
    return sorted(deviations, key=lambda a: (-deviations[a] / (statuses[a].max_share + 1), a))


def assign_to_envoys(outgoing: NodeEnvoyCounts, targets: Mapping[str, int]) -> NodeEnvoyCounts:
    """Divide the sessions that each target receives among the Envoys, within their totals in `outgoing`."""
    remaining_by_envoy: dict[str, int] = {}
    for counts in outgoing.values():
        for instance, count in counts.items():
            remaining_by_envoy[instance] = remaining_by_envoy.get(instance, 0) + count
    incoming: dict[str, Mapping[str, int]] = {}
    envoys = sorted(remaining_by_envoy)
    for address, count in targets.items():
        remaining = count
        parts: dict[str, int] = {}
        while remaining and envoys:
            instance = envoys[0]
            part = min(remaining, remaining_by_envoy[instance])
            parts[instance] = part
            remaining -= part
            remaining_by_envoy[instance] -= part
            if not remaining_by_envoy[instance]:
                envoys.pop(0)
        if parts:
            incoming[address] = MappingProxyType(parts)
    return MappingProxyType(incoming)


def _describe_reason(
    overloaded: Mapping[str, int], underloaded: Mapping[str, int], statuses: Mapping[str, LoadStatus]
) -> str:
    """Describe the node with the largest deviation, and how many others deviate."""
    deviations = overloaded if sum(overloaded.values()) >= sum(underloaded.values()) else underloaded
    address = max(deviations, key=lambda a: (deviations[a], a))
    status = statuses[address]
    text = f"{address} has {status.max_sessions} sessions and its share is {status.max_share}"
    others = len(deviations) - 1
    more = "1 more node is off its share" if others == 1 else f"{others} more nodes are off their share"
    return f"{text}, and {more}" if others else text

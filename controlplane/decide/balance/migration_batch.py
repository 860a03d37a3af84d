"""Who gives how many sessions to whom, among nodes that share theirs, and through which Envoys. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from controlplane.decide.balance.apportion import apportion
from controlplane.decide.balance.fair_share import LoadStatus
from controlplane.model.plan import Policy
from controlplane.model.traffic import SessionCounts

# Seconds that a round lasts at most: so long it may go at the speed that is allowed.
MAX_ROUND_SECONDS = 5.0
# A node may lack so many times what another may have too many: new sessions find it by themselves.
_DEFICIT_TOLERANCE_FACTOR = 2.0

NodeEnvoyCounts = Mapping[str, Mapping[str, int]]  # by address of a node, then by instance of an Envoy


class MigrationBatch(NamedTuple):
    """Sessions that are to leave nodes (`moves`), and those that nodes are to get for that (`wants`)."""

    group: str
    outgoing: NodeEnvoyCounts
    incoming: NodeEnvoyCounts
    sessions: int  # in all
    reason: str  # for whose sake, as a sentence


def plan_batch(
    group: str,
    statuses: Mapping[str, LoadStatus],
    noise_margins: Mapping[str, float],
    capable: Sequence[SessionCounts],
    policy: Policy,
    rotation: int,
) -> MigrationBatch | None:
    """What is to move now; None when nothing is worth it, or nobody can be asked.

    `turn` is another number each time, so that who was asked in vain is not asked again before others.

    Those give that are the furthest above their share, and those get that are the furthest below. No node
    gives so much that it has less than its share, nor gets so many that it has more.
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
    left = count
    for address in _sorted_by_distance(surpluses, statuses):
        if not left:
            break  # of thousands of nodes a few give all that a round may ask for
        held_by_envoy = {c.instance: n for c in capable if (n := c.sessions.get(address, 0))}
        if given := apportion(min(left, surpluses[address]), held_by_envoy, rotation):
            outgoing[address] = MappingProxyType(given)
            left -= sum(given.values())
    if not outgoing:
        return None
    incoming = assign_to_envoys(outgoing, _fill_by_distance(count - left, deficits, statuses))
    return MigrationBatch(
        group,
        MappingProxyType(outgoing),
        incoming,
        count - left,
        _describe_reason(overloaded, underloaded, statuses),
    )


def max_batch_size(policy: Policy) -> int:
    """How many sessions one round may ask for."""
    return max(1, int(policy.rebalance_per_second * MAX_ROUND_SECONDS))


def _tolerance(share: int, noise_margin: float, policy: Policy) -> float:
    """By how many sessions a node may be off its share."""
    return max(policy.rebalance_threshold * share, noise_margin)


def _fill_by_distance(
    count: int, limits: Mapping[str, int], statuses: Mapping[str, LoadStatus]
) -> dict[str, int]:
    """`count` shared out, to each node up to its limit, those first that are the furthest off their share."""
    left, allotted = count, {}
    for address in _sorted_by_distance(limits, statuses):
        if part := min(left, limits[address]):
            allotted[address] = part
            left -= part
    return allotted


def _sorted_by_distance(deviations: Mapping[str, int], statuses: Mapping[str, LoadStatus]) -> list[str]:
    """Nodes by how far they are off their share, the furthest first."""
    return sorted(deviations, key=lambda a: (-deviations[a] / (statuses[a].max_share + 1), a))


def assign_to_envoys(outgoing: NodeEnvoyCounts, targets: Mapping[str, int]) -> NodeEnvoyCounts:
    """What each node gets through which Envoy: of each Envoy as many as it is to move, in all."""
    remaining_by_envoy: dict[str, int] = {}
    for counts in outgoing.values():
        for instance, count in counts.items():
            remaining_by_envoy[instance] = remaining_by_envoy.get(instance, 0) + count
    incoming: dict[str, Mapping[str, int]] = {}
    envoys = sorted(remaining_by_envoy)
    for address, count in targets.items():
        left = count
        parts: dict[str, int] = {}
        while left and envoys:
            instance = envoys[0]
            part = min(left, remaining_by_envoy[instance])
            parts[instance] = part
            left -= part
            remaining_by_envoy[instance] -= part
            if not remaining_by_envoy[instance]:
                envoys.pop(0)
        if parts:
            incoming[address] = MappingProxyType(parts)
    return MappingProxyType(incoming)


def _describe_reason(
    overloaded: Mapping[str, int], underloaded: Mapping[str, int], statuses: Mapping[str, LoadStatus]
) -> str:
    """The node that is the furthest off, in words."""
    deviations = overloaded if sum(overloaded.values()) >= sum(underloaded.values()) else underloaded
    address = max(deviations, key=lambda a: (deviations[a], a))
    node = statuses[address]
    text = f"{address} has {node.max_sessions} sessions and its share is {node.max_share}"
    others = len(deviations) - 1
    more = "1 more node is" if others == 1 else f"{others} more nodes are"
    return f"{text}, and {more} off theirs" if others else text

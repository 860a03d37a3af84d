"""Plan one round of migrations: how many sessions leave and reach each node, on which Envoys. No I/O.

Within a balancing group, sessions migrate from nodes above their fair share to nodes below it. Sessions also
return to the zone of their Envoy: while the nodes of that zone are overloaded or out of service, the Envoy
opens sessions in other zones, and these sessions would otherwise stay there until their clients disconnect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from controlplane.decide.balance.fair_share import BalancingGroup, LoadStatus, integer_shares
from controlplane.model.plan import BalancePolicy, NodePlan, Policy
from controlplane.model.traffic import SessionCounts

# Longest duration of a round. It limits a batch to the sessions that may migrate in this time.
MAX_ROUND_SECONDS = 5.0
# The tolerance for a deficit is this multiple of the tolerance for a surplus, because new sessions reduce a
# deficit without migrations.
_DEFICIT_TOLERANCE_FACTOR = 2.0

T = TypeVar("T")

NodeEnvoyCounts = Mapping[str, Mapping[str, int]]  # node address -> Envoy instance -> sessions


class MigrationBatch(NamedTuple):
    """The migrations of one round in one group: sessions that leave and reach each node."""

    group: str
    outgoing: NodeEnvoyCounts
    incoming: NodeEnvoyCounts
    sessions: int  # total
    reason: str  # the cause, as a sentence


class EnvoyTurn(NamedTuple):
    """Decides which Envoys are asked first.

    After rounds without effect, other Envoys are asked, whose sessions may be able to migrate.
    """

    round: int
    stalled_rounds: int = 0


def plan_batch(
    group: str,
    statuses: Mapping[str, LoadStatus],
    noise_margins: Mapping[str, float],
    capable: Sequence[SessionCounts],
    policy: Policy,
    turn: EnvoyTurn,
) -> MigrationBatch | None:
    """Return the migrations of the next round, or None if none is worthwhile or possible.

    `noise_margins`: by how many sessions each node may differ from its share through noise alone.
    `capable`: the session counts of the Envoys that can migrate sessions.

    Sessions migrate from the nodes furthest above their share to the nodes furthest below it. A migration
    never brings a node past its share.
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
    for address in _sorted_by_relative_deviation(surpluses, statuses):
        if not remaining:
            break  # a few nodes suffice for one round, even in a large fleet
        sessions_by_envoy = {c.instance: n for c in capable if (n := c.sessions.get(address, 0))}
        if parts := apportion(min(remaining, surpluses[address]), sessions_by_envoy, turn):
            outgoing[address] = MappingProxyType(parts)
            remaining -= sum(parts.values())
    if not outgoing:
        return None
    planned = count - remaining
    targets, unassigned = {}, planned
    for address in _sorted_by_relative_deviation(deficits, statuses):
        if part := min(unassigned, deficits[address]):
            targets[address] = part
            unassigned -= part
    incoming = assign_to_envoys(outgoing, targets)
    reason = _describe_reason(overloaded, underloaded, statuses)
    return MigrationBatch(group, MappingProxyType(outgoing), incoming, planned, reason)


def max_batch_size(policy: Policy) -> int:
    """Return the maximum number of sessions that migrate in one round."""
    return max(1, int(policy.rebalance_per_second * MAX_ROUND_SECONDS))


def _tolerance(share: int, noise_margin: float, policy: Policy) -> float:
    """Return by how many sessions a node may differ from its share."""
    return max(policy.rebalance_threshold * share, noise_margin)


def _sorted_by_relative_deviation(
    deviations: Mapping[str, int], statuses: Mapping[str, LoadStatus]
) -> list[str]:
    """Return the nodes ordered by deviation relative to their share, largest first."""
    return sorted(deviations, key=lambda a: (-deviations[a] / (statuses[a].max_share + 1), a))


def assign_to_envoys(outgoing: NodeEnvoyCounts, targets: Mapping[str, int]) -> NodeEnvoyCounts:
    """Divide each target's sessions among the Envoys. No Envoy gets more than its total in `outgoing`."""
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


def apportion(total: int, holders: Mapping[str, int], turn: EnvoyTurn) -> dict[str, int]:
    """Divide `total` in proportion to the numbers in `holders`. No holder gets more than its number.

    Each holder gets its quota rounded down; the holders with the largest remainders get one more. Of equal
    ones, another comes first in each round. After rounds without effect, remainders do not count: the holders
    take turns. Holders that get nothing are left out.
    """
    held_total = sum(holders.values())
    total = min(total, held_total)
    if total <= 0:
        return {}
    quotas = {name: divmod(total * held, held_total) for name, held in holders.items()}
    leftover = total - sum(quota for quota, _ in quotas.values())
    with_remainder = [name for name in sorted(quotas) if quotas[name][1]]
    if turn.stalled_rounds:
        order = _rotate(with_remainder, turn.stalled_rounds * leftover)
    else:
        order = sorted(_rotate(with_remainder, turn.round), key=lambda name: -quotas[name][1])
    rounded_up = set(order[:leftover])
    shares = {name: quotas[name][0] + (name in rounded_up) for name in sorted(quotas)}
    return {name: share for name, share in shares.items() if share}


def plan_zone_return(
    balancing_group: BalancingGroup,
    statuses: Mapping[str, LoadStatus],
    served: Mapping[str, NodePlan],
    load_per_capacity: float,
    envoys: Sequence[SessionCounts],
    policy: Policy,
    turn: EnvoyTurn,
) -> MigrationBatch | None:
    """Return the migrations of sessions back to the zone of their Envoys, or None if there are none.

    `balancing_group` has the nodes of the zone, `statuses` their load, `served` all nodes in service, and
    `envoys` the session counts of the Envoys in the zone that can migrate sessions.
    With policy `resource`, sessions return until the load of the zone is `load_per_capacity`, the sessions
    per capacity of the whole group, so the zone does not become overloaded. `location` has no such limit.
    """
    count = max_batch_size(policy)
    if policy.balance_policy is not BalancePolicy.LOCATION:
        max_here = math.floor(load_per_capacity * sum(balancing_group.capacities.values()))
        count = min(count, max_here - sum(status.max_sessions for status in statuses.values()))
    if count < 1:
        return None
    group, zone, capacities = balancing_group
    elsewhere = {a for a, p in served.items() if p.group == group and p.zone != zone}
    outgoing = _select_outgoing(count, _rotate(envoys, turn.round), elsewhere)
    if not outgoing:
        return None
    count = sum(sum(counts.values()) for counts in outgoing.values())
    current = [status.max_sessions for status in statuses.values()]
    shares = integer_shares(list(capacities.values()), current, current, added=count)
    targets = {a: n - c for a, n, c in zip(statuses, shares, current, strict=True) if n > c}
    reason = f"zone {zone} has capacity again for its Envoys' sessions in other zones"
    return MigrationBatch(group, outgoing, assign_to_envoys(outgoing, targets), count, reason)


def _rotate(items: Sequence[T], by: int) -> list[T]:
    first = by % len(items) if items else 0
    return [*items[first:], *items[:first]]


def _select_outgoing(
    count: int, envoys: Sequence[SessionCounts], elsewhere: Collection[str]
) -> NodeEnvoyCounts:
    """Select up to `count` sessions on the nodes in `elsewhere`, from one Envoy after the other."""
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

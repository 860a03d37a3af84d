"""How many sessions are asked to leave which node, for which others, through which Envoy. Pure.

Nodes that have more sessions than their share give some away, to nodes that have fewer. Neither does so for
a few that chance may explain, and that new sessions will make up for.

It goes in rounds, since what has moved shows only in later reports. A round asks for a number of sessions,
lasts a few seconds, and is withdrawn. The next is decided when each Envoy that takes part has told where its
sessions are since then. So nothing is asked for twice, nor anything at all without new reports
(docs/internals/decisions/0009-rebalancing-goes-in-rounds.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from controlplane.decide import session_counts
from controlplane.decide.balance.balancing_groups import BalancingGroup, balancing_groups
from controlplane.decide.balance.fair_share import LoadStatus, load_statuses
from controlplane.decide.balance.migration_batch import (
    MAX_ROUND_SECONDS,
    MigrationBatch,
    max_batch_size,
    plan_batch,
)
from controlplane.decide.balance.zone_return import plan_zone_return
from controlplane.model.facts import Facts
from controlplane.model.nodes import EMPTY_MAP, GroupZone, State
from controlplane.model.plan import NodePlan, Plan, Policy, RebalanceState
from controlplane.model.traffic import MOVED, SessionCounts, migrations_by_reason

# Seconds that a round lasts at least: the more it asks for, the longer.
_MIN_ROUND_SECONDS = 1.0
# Seconds of opened and ended sessions that counts may not know of yet; chance is taken to account for so many
# times the standard deviation of that.
_REPORT_LAG_SECONDS, _NOISE_DEVIATIONS = 3.0, 1.5
# Rounds in a row that may change nothing; then seconds until the next one, twice as many after each, at most.
_MAX_STALLED_ROUNDS, _PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 3, 10.0, 300.0
# A round for fewer sessions is nothing that anybody has to hear of.
_MIN_REPORTED_SESSIONS = 10

_BALANCED_REASON = "all nodes have about their share, or what they have beyond it cannot move"


def rebalance(
    planned: Mapping[str, NodePlan],
    overloaded_zones: Collection[GroupZone],
    panic_threshold_reason: str,
    previous: Plan,
    facts: Facts,
    policy: Policy,
    now: float,
) -> RebalanceState:
    """What is asked for now. `planned`, `full` and `floor` are the new plan's, `previous` is the last one."""
    before = previous.rebalance
    if not policy.rebalance_enabled:
        return _finished(before, "it was switched off", now)
    if panic_threshold_reason:
        return _finished(before, "the checks of nodes are not trusted", now)
    served = {a: p for a, p in planned.items() if p.state is State.ACTIVE}
    if _fleet_changed(previous, served):
        before = replace(before, stalled_rounds=0, paused_until=0.0) if before.stalled_rounds else before
        if before.outgoing:
            return _cancelled(before, now)  # the shares that it rests on are others now
    if before.outgoing:
        return _cancelled(before, now) if now >= before.round_ends_at else before
    if now - facts.observing_since < policy.reconnect_grace or now < before.paused_until:
        return before  # nobody knows yet which Envoys there are; or it would change nothing
    capable, incapable = session_counts.migration_capable(facts, policy, now)
    if not capable:
        return _finished(before, "no Envoy has a module that could be asked", now)
    round_number = max(before.round + 1, int(now))  # new, also when the rounds before are forgotten
    groups = balancing_groups(served, overloaded_zones, facts.envoy_zones, policy, now)
    surplus, candidates = _candidate_batches(
        groups, served, capable, incapable, facts, policy, now, round_number
    )
    if not candidates and before.surplus < 0:
        return _finished(before, _BALANCED_REASON, now)
    if not _reports_are_fresh(served, candidates, before, capable.values(), facts, policy, now):
        return before  # who has not told yet will
    moved = sum(sum(migrations_by_reason(each, MOVED).values()) for each in facts.migrations.values())
    if before.surplus >= 0:
        before = _with_round_outcome(before, surplus, moved, now)
        if now < before.paused_until:
            return before
    if not candidates:
        return _finished(before, _BALANCED_REASON, now)
    selected = _select_batches(candidates, before.stalled_rounds, policy)
    outgoing = {a: counts for each in selected for a, counts in each.outgoing.items()}
    incoming = {a: counts for each in selected for a, counts in each.incoming.items()}
    count = sum(each.sessions for each in selected)
    length = count / policy.rebalance_per_second
    is_reported = before.since is not None or count >= _MIN_REPORTED_SESSIONS
    return RebalanceState(
        since=before.since or now if is_reported else None,
        reason=before.reason if before.since is not None else selected[0].reason,
        round=round_number,
        round_ends_at=now + min(MAX_ROUND_SECONDS, max(_MIN_ROUND_SECONDS, length)),
        outgoing=outgoing,
        incoming=incoming,
        stalled_rounds=before.stalled_rounds,
        surplus=surplus,
        migrated_before=before.migrated_before if before.stalled_rounds else moved,
    )


def _candidate_batches(
    groups: Sequence[BalancingGroup],
    served: Mapping[str, NodePlan],
    capable: Mapping[str, SessionCounts],
    incapable: Collection[SessionCounts],
    facts: Facts,
    policy: Policy,
    now: float,
    rotation: int,
) -> tuple[int, list[MigrationBatch]]:
    """How many sessions nodes have beyond their shares, and all that might be asked for."""
    statuses_by_group = [
        load_statuses(served, each.capacities, incapable, facts, policy, now) for each in groups
    ]
    surplus, batches = 0, []
    for balancing_group, statuses in zip(groups, statuses_by_group, strict=True):
        surplus += sum(
            s.min_sessions - s.max_share for s in statuses.values() if s.min_sessions > s.max_share
        )
        noise_margins = _noise_margins(balancing_group, served, facts.new_sessions_per_second)
        if batch := plan_batch(
            balancing_group.group, statuses, noise_margins, list(capable.values()), policy, rotation
        ):
            batches.append(batch)
        if balancing_group.zone:
            load_per_capacity = _group_load(balancing_group.group, groups, statuses_by_group)
            if batch := plan_zone_return(
                balancing_group,
                statuses,
                served,
                load_per_capacity,
                capable,
                facts.envoy_zones,
                policy,
                rotation,
            ):
                surplus += batch.sessions
                batches.append(batch)
    return surplus, batches


def _group_load(
    group: str, groups: Sequence[BalancingGroup], statuses: Sequence[Mapping[str, LoadStatus]]
) -> float:
    """Sessions of a group for each unit of its capacity."""
    of_group = [(s, n) for s, n in zip(groups, statuses, strict=True) if s.group == group]
    total_capacity = sum(sum(sharers.capacities.values()) for sharers, _ in of_group)
    return (
        sum(each.max_sessions for _, numbers in of_group for each in numbers.values()) / total_capacity
        if total_capacity
        else 0.0
    )


def _fleet_changed(previous: Plan, served: Mapping[str, NodePlan]) -> bool:
    """Whether nodes came or went, or have another weight or place, so that shares are not what they were."""
    for address, past in previous.nodes.items():
        planned = served.get(address)
        if (past.state is State.ACTIVE) is not (planned is not None):
            return True
        if planned is not None and planned is not past and _share_inputs(planned) != _share_inputs(past):
            return True
    return not served.keys() <= previous.nodes.keys()


def _share_inputs(planned: NodePlan) -> tuple[int, str, bool, str]:
    return planned.node.weight, planned.group, planned.backup, planned.zone


def _finished(before: RebalanceState, reason: str, now: float) -> RebalanceState:
    ended = _cancelled(before, now)
    if before.since is None and before.surplus < 0 and not before.stalled_rounds:
        return ended
    return replace(ended, since=None, reason=reason, stalled_rounds=0, surplus=-1, migrated_before=0)


def _cancelled(before: RebalanceState, now: float) -> RebalanceState:
    if not before.outgoing:
        return before
    return replace(
        before, outgoing=EMPTY_MAP, incoming=EMPTY_MAP, round_ends_at=min(before.round_ends_at, now)
    )


def _with_round_outcome(before: RebalanceState, surplus: int, moved: int, now: float) -> RebalanceState:
    """What came of the latest round. When rounds change nothing, there is a pause before the next."""
    if moved > before.migrated_before or surplus < before.surplus:
        return replace(before, stalled_rounds=0, surplus=-1)
    stalled_rounds = before.stalled_rounds + 1
    if stalled_rounds < _MAX_STALLED_ROUNDS:
        return replace(before, stalled_rounds=stalled_rounds, surplus=-1)
    pause = min(_MAX_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0 ** min(stalled_rounds - _MAX_STALLED_ROUNDS, 10))
    return replace(before, stalled_rounds=stalled_rounds, surplus=-1, paused_until=now + pause)


def _noise_margins(
    balancing_group: BalancingGroup, served: Mapping[str, NodePlan], arrivals: float
) -> Mapping[str, float]:
    """By how many sessions each node may be off its share without anything being wrong."""
    total_weight = sum(p.node.weight for p in served.values())
    # What opens also ends: the variance is that of two such streams.
    variance_per_weight = 2.0 * arrivals * _REPORT_LAG_SECONDS / total_weight if total_weight else 0.0
    # Where no session opens, as on a node that only stands in, chance has no part.
    return {
        a: _NOISE_DEVIATIONS * math.sqrt(variance_per_weight * served[a].node.weight) if capacity else 0.0
        for a, capacity in balancing_group.capacities.items()
    }


def _select_batches(
    candidates: Sequence[MigrationBatch], stalled_rounds: int, policy: Policy
) -> list[MigrationBatch]:
    """What is asked for in this round: at least one, and of all together no more than the speed allows.

    Within an Envoy groups have nothing in common, but zones have: of these one has its turn in a round. Those
    with the most to do come first; after rounds that have changed nothing, others.
    """
    zones: dict[str, list[MigrationBatch]] = {}
    for each in sorted(candidates, key=lambda each: -each.sessions):
        zones.setdefault(each.group, []).append(each)
    groups = list(zones.values())
    first = stalled_rounds % len(groups)
    selected: list[MigrationBatch] = []
    left = max_batch_size(policy)
    for group in groups[first:] + groups[:first]:
        each = group[stalled_rounds // len(groups) % len(group)]
        if not selected or each.sessions <= left:
            selected.append(each)
            left -= each.sessions
    return selected


def _reports_are_fresh(
    served: Mapping[str, NodePlan],
    batches: Sequence[MigrationBatch],
    before: RebalanceState,
    capable: Collection[SessionCounts],
    facts: Facts,
    policy: Policy,
    now: float,
) -> bool:
    """Whether all counts are of after the latest round.

    TiDB's own are as soon as no move of it is under way any more. Where one is missing, each Envoy must have
    told since, also of the nodes that are to get some; one that has fallen silent is not waited for.
    """
    settled_at = before.round_ends_at + policy.migration_timeout
    fresh_from = session_counts.tidb_count_stale_before(policy, now)
    counted_at = [
        health.connections_at if (health := facts.health.get(address)) is not None else None
        for address in served
    ]
    if any(at is not None and fresh_from <= at < settled_at for at in counted_at):
        return False
    receivers = {address for each in batches for address in each.incoming}
    is_counted = all(at is not None and at >= fresh_from for at in counted_at)
    earliest = -math.inf if is_counted else settled_at + session_counts.COUNT_DELAY_SECONDS
    return all(census.counting_since >= earliest and receivers <= census.complete_nodes for census in capable)

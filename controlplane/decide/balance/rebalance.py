"""Decide how many sessions migrate from which nodes to which nodes, and on which Envoys. No I/O.

Sessions migrate from nodes above their fair share to nodes below it. Small deviations are ignored: random
arrivals cause them, and new sessions correct them.

Rebalancing goes in rounds, because a migration shows only in later reports. A round requests migrations,
lasts a few seconds, and is then cancelled. The next round starts once every participating Envoy has reported
its sessions after the end of the previous round, so that no migration is requested twice
(docs/internals/decisions/0009-rebalancing-goes-in-rounds.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from controlplane.decide import session_counts
from controlplane.decide.balance.fair_share import BalancingGroup, LoadStatus, balancing_groups, load_statuses
from controlplane.decide.balance.migration_batch import (
    MAX_ROUND_SECONDS,
    EnvoyTurn,
    MigrationBatch,
    max_batch_size,
    plan_batch,
    plan_zone_return,
)
from controlplane.decide.inputs import Inputs
from controlplane.model.nodes import EMPTY_MAP, GroupZone, State
from controlplane.model.plan import NodePlan, Plan, Policy, RebalanceState
from controlplane.model.traffic import MOVED, SessionCounts, migrations_by_reason

# Shortest duration of a round; rounds with more sessions last longer.
_MIN_ROUND_SECONDS = 1.0
# Counts show opened and ended sessions up to _REPORT_LAG_SECONDS late. Deviations up to _NOISE_DEVIATIONS
# standard deviations of the resulting noise are ignored.
_REPORT_LAG_SECONDS, _NOISE_DEVIATIONS = 3.0, 1.5
# After _MAX_STALLED_ROUNDS consecutive rounds without improvement, there is a pause before each further
# round. Once _SHORT_PAUSES have passed, the pause doubles each time, up to the maximum.
_MAX_STALLED_ROUNDS, _PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 3, 10.0, 300.0
# Rebalancing does not migrate a session again for 60 s. The rounds and pauses before the first doubling take
# longer than that.
_SHORT_PAUSES = 4
# Rebalancing that starts with fewer sessions causes no event.
_MIN_REPORTED_SESSIONS = 10

_BALANCED_REASON = "all nodes have about their share, or the surplus cannot be migrated"


def rebalance(
    planned: Mapping[str, NodePlan],
    overloaded_zones: Collection[GroupZone],
    panic_threshold_reason: str,
    inputs: Inputs,
) -> RebalanceState:
    """Return the next rebalancing state. All arguments but `inputs` are parts of the new plan."""
    previous, facts, policy, now, _ = inputs
    before = previous.rebalance
    if not policy.rebalance_enabled:
        return _finished(before, "rebalancing is disabled", now)
    if panic_threshold_reason:
        return _finished(before, "failing nodes are kept in service, so their checks are not trusted", now)
    served = {a: p for a, p in planned.items() if p.state is State.ACTIVE}
    if _fleet_changed(previous, served):
        before = replace(before, stalled_rounds=0, paused_until=0.0) if before.stalled_rounds else before
        if before.outgoing:
            return _cancelled(before, now)  # the round is based on outdated shares
    if before.outgoing:
        return _cancelled(before, now) if now >= before.round_ends_at else before
    if now - facts.observing_since < policy.reconnect_grace or now < before.paused_until:
        return before  # some Envoys may not be known yet, or recent rounds had no effect
    capable, incapable = session_counts.migration_capable(inputs)
    if not capable:
        is_switched_off = any(not inputs.may_migrate_sessions(envoy) for envoy in facts.session_counts)
        reason = (
            "session migration is switched off"
            if is_switched_off
            else "no Envoy has a module that can migrate sessions"
        )
        return _finished(before, reason, now)
    round_number = max(before.round + 1, int(now))  # also higher than before a restart
    groups = balancing_groups(served, overloaded_zones, facts.envoy_zones, policy, now)
    turn = EnvoyTurn(round_number, before.stalled_rounds)
    surplus, candidates = _candidate_batches(groups, served, capable, incapable, inputs, turn)
    if not candidates and before.surplus < 0:
        return _finished(before, _BALANCED_REASON, now)
    if not _reports_are_fresh(served, candidates, before, capable.values(), inputs):
        return before  # wait for the missing reports
    migrated = sum(sum(migrations_by_reason(counts, MOVED).values()) for counts in facts.migrations.values())
    if before.surplus >= 0:
        before = _with_round_outcome(before, surplus, migrated, now)
        if now < before.paused_until:
            return before
    if not candidates:
        return _finished(before, _BALANCED_REASON, now)
    selected = _select_batches(candidates, before.stalled_rounds, policy)
    outgoing = {a: counts for batch in selected for a, counts in batch.outgoing.items()}
    incoming = {a: counts for batch in selected for a, counts in batch.incoming.items()}
    count = sum(batch.sessions for batch in selected)
    duration = count / policy.rebalance_per_second
    is_reported = before.since is not None or count >= _MIN_REPORTED_SESSIONS
    return RebalanceState(
        since=before.since or now if is_reported else None,
        reason=before.reason if before.since is not None else selected[0].reason,
        round=round_number,
        round_ends_at=now + min(MAX_ROUND_SECONDS, max(_MIN_ROUND_SECONDS, duration)),
        outgoing=outgoing,
        incoming=incoming,
        stalled_rounds=before.stalled_rounds,
        surplus=surplus,
        migrated_before=before.migrated_before if before.stalled_rounds else migrated,
    )


def _candidate_batches(
    groups: Sequence[BalancingGroup],
    served: Mapping[str, NodePlan],
    capable: Mapping[str, SessionCounts],
    incapable: Collection[SessionCounts],
    inputs: Inputs,
    turn: EnvoyTurn,
) -> tuple[int, list[MigrationBatch]]:
    """Return how many sessions should migrate in total, and the possible batches of the next round."""
    facts, policy = inputs.facts, inputs.policy
    statuses_by_group = [load_statuses(served, group.capacities, incapable, inputs) for group in groups]
    surplus, batches = 0, []
    for balancing_group, statuses in zip(groups, statuses_by_group, strict=True):
        surplus += sum(status.surplus for status in statuses.values() if status.surplus > 0)
        group, zone, _ = balancing_group
        noise_margins = _noise_margins(balancing_group, served, facts.new_sessions_per_second)
        if batch := plan_batch(group, statuses, noise_margins, list(capable.values()), policy, turn):
            batches.append(batch)
        if zone:
            load = _group_load(group, groups, statuses_by_group)
            in_zone = [counts for envoy, counts in capable.items() if facts.envoy_zones.get(envoy) == zone]
            if batch := plan_zone_return(balancing_group, statuses, served, load, in_zone, policy, turn):
                surplus += batch.sessions
                batches.append(batch)
    return surplus, batches


def _group_load(
    group: str, groups: Sequence[BalancingGroup], statuses: Sequence[Mapping[str, LoadStatus]]
) -> float:
    """Return the sessions per unit of capacity in a node group."""
    parts = [(b, s) for b, s in zip(groups, statuses, strict=True) if b.group == group]
    capacity = sum(sum(balancing_group.capacities.values()) for balancing_group, _ in parts)
    sessions = sum(s.max_sessions for _, group_statuses in parts for s in group_statuses.values())
    return sessions / capacity if capacity else 0.0


def _fleet_changed(previous: Plan, served: Mapping[str, NodePlan]) -> bool:
    """Return whether nodes entered or left service, or changed weight, group, backup role or zone."""
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
    ends_at = min(before.round_ends_at, now)
    return replace(before, outgoing=EMPTY_MAP, incoming=EMPTY_MAP, round_ends_at=ends_at)


def _with_round_outcome(before: RebalanceState, surplus: int, migrated: int, now: float) -> RebalanceState:
    """Evaluate the latest round. After several rounds without improvement, set a pause."""
    if migrated > before.migrated_before or surplus < before.surplus:
        return replace(before, stalled_rounds=0, surplus=-1)
    stalled_rounds = before.stalled_rounds + 1
    if stalled_rounds < _MAX_STALLED_ROUNDS:
        return replace(before, stalled_rounds=stalled_rounds, surplus=-1)
    doublings = min(10, max(0, stalled_rounds - _MAX_STALLED_ROUNDS - _SHORT_PAUSES + 1))
    pause = min(_MAX_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0**doublings)
    return replace(before, stalled_rounds=stalled_rounds, surplus=-1, paused_until=now + pause)


def _noise_margins(
    balancing_group: BalancingGroup, served: Mapping[str, NodePlan], arrivals: float
) -> Mapping[str, float]:
    """Return by how many sessions each node may differ from its share through noise alone."""
    total_weight = sum(p.node.weight for p in served.values())
    # Sessions end as fast as they open, so the variance is the sum of two Poisson variances.
    variance_per_weight = 2.0 * arrivals * _REPORT_LAG_SECONDS / total_weight if total_weight else 0.0
    # A node of capacity 0, such as an unused backup, receives no new sessions and has no noise.
    return {
        a: _NOISE_DEVIATIONS * math.sqrt(variance_per_weight * served[a].node.weight) if capacity else 0.0
        for a, capacity in balancing_group.capacities.items()
    }


def _select_batches(
    candidates: Sequence[MigrationBatch], stalled_rounds: int, policy: Policy
) -> list[MigrationBatch]:
    """Return the batches of the next round: one, or several that are together within the rate limit.

    A round has at most one batch per group, because an Envoy does not distinguish the zones of a group. The
    largest batch comes first; after rounds without improvement, another batch comes first.
    """
    batches_by_group: dict[str, list[MigrationBatch]] = {}
    for batch in sorted(candidates, key=lambda batch: -batch.sessions):
        batches_by_group.setdefault(batch.group, []).append(batch)
    groups = list(batches_by_group.values())
    first = stalled_rounds % len(groups)
    selected: list[MigrationBatch] = []
    remaining = max_batch_size(policy)
    for batches in groups[first:] + groups[:first]:
        batch = batches[stalled_rounds // len(groups) % len(batches)]
        if not selected or batch.sessions <= remaining:
            selected.append(batch)
            remaining -= batch.sessions
    return selected


def _reports_are_fresh(
    served: Mapping[str, NodePlan],
    batches: Sequence[MigrationBatch],
    before: RebalanceState,
    capable: Collection[SessionCounts],
    inputs: Inputs,
) -> bool:
    """Return whether all session counts are from after the latest round.

    A TiDB server's own count is used if it is from after the last possible migration of the round. If any
    server has no such count, all capable Envoys must have reported since then. In any case, the reports of
    these Envoys must include the nodes that receive sessions.
    """
    settled_at = before.round_ends_at + inputs.policy.migration_timeout
    fresh_from = inputs.tidb_counts_stale_before
    checked = [inputs.facts.health.get(address) for address in served]
    counted_at = [None if health is None else health.connections_at for health in checked]
    if any(at is not None and fresh_from <= at < settled_at for at in counted_at):
        return False
    receivers = {address for batch in batches for address in batch.incoming}
    is_counted = all(at is not None and at >= fresh_from for at in counted_at)
    earliest = -math.inf if is_counted else settled_at + session_counts.COUNT_DELAY_SECONDS
    return all(
        counts.oldest_count_at >= earliest and receivers <= counts.complete_nodes for counts in capable
    )

"""Tracks what happens to the sessions of each draining or removed node since its drain began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.session_counts import session_count
from controlplane.model.facts import Facts
from controlplane.model.module_switches import NO_OVERRIDES, SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.traffic import FAILED, LOST, MOVED, MigrationCounts, migrations_by_reason, sum_traffic
from controlplane.model.views import DrainProgress

# If the session count has not decreased for this long, the time left is not estimated.
_STALL_SECONDS = 5.0

SWITCHED_OFF = "switched_off"
"""Why sessions cannot migrate: migrations are switched off in their Envoy."""

_LEAVING_STATES = (State.DRAINING, State.DRAINED, State.GONE)


@dataclass(slots=True)
class _DrainRecord:
    """The drain of one node."""

    started_at: float
    migrations_at_start: MigrationCounts
    max_sessions: int = 0
    last_sessions: int = 0  # the latest known count
    last_decrease_at: float = 0.0  # when the session count last decreased
    emptied_at: float | None = None  # when the node was first observed without sessions
    is_reported: bool = False  # whether `update` has returned the result of this drain

    def observe(self, sessions: int | None, now: float) -> None:
        """Record the current session count of the node, or None if it is unknown."""
        self.max_sessions = max(self.max_sessions, sessions or 0)
        if sessions is not None:
            self.last_decrease_at = now if sessions < self.last_sessions else self.last_decrease_at
            self.last_sessions = sessions
        if sessions != 0:
            self.emptied_at = None
        elif self.emptied_at is None:
            self.emptied_at = now


class DrainProgressTracker:
    """Tracks each node that is draining, drained or gone."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        """The current policy."""
        self._records: dict[str, _DrainRecord] = {}
        self._switch_overrides: Mapping[str, SwitchOverrides] = EMPTY_MAP

    def update(self, plan: Plan, facts: Facts, now: float) -> list[tuple[str, DrainProgress]]:
        """Apply a new plan. Return address and result of each drain that just ended and had sessions."""
        self._switch_overrides = plan.switch_overrides
        leaving = {a: p for a, p in plan.nodes.items() if p.state in _LEAVING_STATES}
        over = {a: self._records.pop(a) for a in self._records.keys() - leaving.keys()}
        finished = {address: record for address, record in sorted(over.items()) if not record.is_reported}
        for address, planned in leaving.items():
            record = self._records.get(address) or self._records.setdefault(
                address, _DrainRecord(now, dict(facts.migrations.get(address, {})))
            )
            record.observe(session_count(address, planned.endpoint, facts), now)
            is_drained = planned.state is State.DRAINED
            if is_drained and not record.is_reported:
                finished[address] = record
            record.is_reported = is_drained
        results = [
            (address, self._progress(address, plan.nodes.get(address), record, facts, now))
            for address, record in finished.items()
        ]
        return [(address, progress) for address, progress in results if progress.had_sessions]

    def get(self, planned: NodePlan, facts: Facts, now: float) -> DrainProgress | None:
        """Return the progress of a node's drain; None if the node is not draining, drained or gone."""
        address = planned.node.address
        record = self._records.get(address)
        return self._progress(address, planned, record, facts, now) if record is not None else None

    def _progress(
        self, address: str, planned: NodePlan | None, record: _DrainRecord, facts: Facts, now: float
    ) -> DrainProgress:
        not_movable = _sum_not_movable(address, facts, self.policy, self._switch_overrides)
        return _drain_progress(address, planned, record, facts, not_movable, now)


def _sum_not_movable(
    address: str, facts: Facts, policy: Policy, switch_overrides: Mapping[str, SwitchOverrides]
) -> Mapping[str, int]:
    """Return how many sessions of a node cannot migrate now, by reason."""
    movable, switched_off = [], 0
    for report in facts.module_reports.values():
        if address not in report.nodes:
            continue
        traffic = report.nodes[address]
        overrides = switch_overrides.get(report.envoy, NO_OVERRIDES)
        if overrides.apply_to(policy.module_switches).without(report.runtime_off).migration:
            movable.append(traffic)
        else:
            switched_off += sum(traffic.sessions.values())
    not_movable = {**sum_traffic(movable).not_movable, SWITCHED_OFF: switched_off}
    return MappingProxyType({reason: count for reason, count in not_movable.items() if count})


def _drain_progress(
    address: str,
    planned: NodePlan | None,
    record: _DrainRecord,
    facts: Facts,
    not_movable: Mapping[str, int],
    now: float,
) -> DrainProgress:
    at_start = record.migrations_at_start
    increases = {
        key: count - at_start.get(key, 0) for key, count in facts.migrations.get(address, {}).items()
    }
    migrations = {key: count for key, count in increases.items() if count > 0}
    sessions_left = session_count(address, planned.endpoint, facts) if planned is not None else None
    elapsed_seconds = max((now if record.emptied_at is None else record.emptied_at) - record.started_at, 0.0)
    return DrainProgress(
        since=record.started_at,
        elapsed_seconds=elapsed_seconds,
        sessions_left=sessions_left,
        migrated=sum(migrations_by_reason(migrations, MOVED).values()),
        failed=MappingProxyType(migrations_by_reason(migrations, FAILED)),
        lost=sum(migrations_by_reason(migrations, LOST).values()),
        not_movable=not_movable,
        seconds_left=_estimate_seconds_left(
            sessions_left, sum(not_movable.values()), record, elapsed_seconds, now
        ),
        had_sessions=bool(record.max_sessions or migrations),
    )


def _estimate_seconds_left(
    sessions_left: int | None, not_movable: int, record: _DrainRecord, elapsed_seconds: float, now: float
) -> float | None:
    """Estimate the time until the movable sessions have left, from the average rate since the drain began.

    Return None if the count is unknown, no session can migrate, or no session has left at all or recently.
    """
    if sessions_left == 0:
        return 0.0
    if sessions_left is None or sessions_left <= not_movable or sessions_left >= record.max_sessions:
        return None
    if sessions_left >= record.last_sessions and now - record.last_decrease_at >= _STALL_SECONDS:
        return None
    return elapsed_seconds * (sessions_left - not_movable) / (record.max_sessions - sessions_left)

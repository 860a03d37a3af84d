"""Tracks what happens to the sessions of draining and removed nodes, from the start of each drain."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.session_counts import session_count
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.traffic import FAILED, LOST, MOVED, MigrationCounts, migrations_by_reason, sum_traffic
from controlplane.model.views import DrainProgress

# If the session count has not decreased for this long, the pace so far does not predict the time left.
_STALL_SECONDS = 5.0

_LEAVING_STATES = (State.DRAINING, State.DRAINED, State.GONE)


@dataclass(slots=True)
class _DrainRecord:
    """The drain of one node."""

    started_at: float
    migrations_at_start: MigrationCounts
    max_sessions: int = 0
    last_sessions: int = 0  # the latest known count
    last_decrease_at: float = 0.0  # when the session count last fell
    emptied_at: float | None = None  # when the node was first observed without sessions
    is_reported: bool = False  # whether `update` has returned the end of this drain


class DrainProgressTracker:
    """Keeps one record per node that is draining, drained or gone."""

    def __init__(self) -> None:
        self._records: dict[str, _DrainRecord] = {}

    def update(self, plan: Plan, facts: Facts, now: float) -> list[tuple[str, DrainProgress]]:
        """Apply a new plan; return address and result of every drain that ended with it and had sessions."""
        finished = []
        for address in list(self._records):
            planned = plan.nodes.get(address)
            if planned is None or planned.state not in _LEAVING_STATES:
                record = self._records.pop(address)
                if not record.is_reported:
                    finished.append((address, _drain_progress(address, planned, record, facts, now)))
        for address, planned in plan.nodes.items():
            if planned.state not in _LEAVING_STATES:
                continue
            record = self._records.get(address) or self._records.setdefault(
                address, _DrainRecord(now, dict(facts.migrations.get(address, {})))
            )
            sessions = session_count(address, planned.endpoint, facts)
            record.max_sessions = max(record.max_sessions, sessions or 0)
            if sessions is not None:
                record.last_decrease_at = now if sessions < record.last_sessions else record.last_decrease_at
                record.last_sessions = sessions
            if sessions != 0:
                record.emptied_at = None
            elif record.emptied_at is None:
                record.emptied_at = now
            if planned.state is not State.DRAINED:
                record.is_reported = False
            elif not record.is_reported:
                record.is_reported = True
                finished.append((address, _drain_progress(address, planned, record, facts, now)))
        return [(address, progress) for address, progress in finished if progress.had_sessions]

    def get(self, planned: NodePlan, facts: Facts, now: float) -> DrainProgress | None:
        """Return the progress of a node's drain; None if the node is not draining, drained or gone."""
        address = planned.node.address
        record = self._records.get(address)
        return _drain_progress(address, planned, record, facts, now) if record is not None else None


def _drain_progress(
    address: str, planned: NodePlan | None, record: _DrainRecord, facts: Facts, now: float
) -> DrainProgress:
    migrations = _increase_since(record.migrations_at_start, facts.migrations.get(address, {}))
    sessions_left = session_count(address, planned.endpoint, facts) if planned is not None else None
    elapsed_seconds = max((now if record.emptied_at is None else record.emptied_at) - record.started_at, 0.0)
    reports = [report.nodes[address] for report in facts.module_reports.values() if address in report.nodes]
    not_movable = {reason: count for reason, count in sum_traffic(reports).not_movable.items() if count}
    return DrainProgress(
        since=record.started_at,
        elapsed_seconds=elapsed_seconds,
        sessions_left=sessions_left,
        moved=sum(migrations_by_reason(migrations, MOVED).values()),
        failed=MappingProxyType(migrations_by_reason(migrations, FAILED)),
        lost=sum(migrations_by_reason(migrations, LOST).values()),
        not_movable=MappingProxyType(not_movable),
        seconds_left=_estimate_seconds_left(
            sessions_left, sum(not_movable.values()), record, elapsed_seconds, now
        ),
        had_sessions=bool(record.max_sessions or migrations),
    )


def _increase_since(before: MigrationCounts, now: MigrationCounts) -> MigrationCounts:
    increases = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in increases.items() if count > 0}


def _estimate_seconds_left(
    sessions_left: int | None, not_movable: int, record: _DrainRecord, elapsed_seconds: float, now: float
) -> float | None:
    """Estimate how long the movable sessions need at the pace so far.

    None if the count is unknown, no session can migrate, none has left yet, or none has left recently.
    """
    if sessions_left == 0:
        return 0.0
    if sessions_left is None or sessions_left <= not_movable or sessions_left >= record.max_sessions:
        return None
    if sessions_left >= record.last_sessions and now - record.last_decrease_at >= _STALL_SECONDS:
        return None
    return elapsed_seconds * (sessions_left - not_movable) / (record.max_sessions - sessions_left)

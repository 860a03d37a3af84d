"""What becomes of the sessions of nodes that are being left, from when that began."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.session_counts import session_count
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.traffic import FAILED, LOST, MOVED, MigrationCounts, migrations_by_reason, sum_traffic
from controlplane.model.views import DrainProgress

# Seconds without a session less after which the pace so far says nothing of those that are left.
_STALL_SECONDS = 5.0

_LEAVING_STATES = (State.DRAINING, State.DRAINED, State.GONE)


@dataclass(slots=True)
class _DrainRecord:
    """One node's."""

    started_at: float
    migrations_at_start: MigrationCounts  # counted by then
    max_sessions: int = 0  # sessions that it had when that was first known
    last_sessions: int = 0  # that it had last
    last_decrease_at: float = 0.0  # when there was one less for the last time
    emptied_at: float | None = None  # when the last one was seen to have left
    is_reported: bool = False  # that it has ended


class DrainProgressTracker:
    """The nodes that are being left, and those that were left and still are kept empty."""

    def __init__(self) -> None:
        self._records: dict[str, _DrainRecord] = {}

    def update(self, plan: Plan, facts: Facts, now: float) -> list[tuple[str, DrainProgress]]:
        """Take over a new plan. Whose departure has ended with it, and what came of it."""
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
        return [(address, told) for address, told in finished if told.had_sessions]

    def get(self, planned: NodePlan, facts: Facts, now: float) -> DrainProgress | None:
        """What has come of a node's sessions so far; None when it is not being left."""
        address = planned.node.address
        record = self._records.get(address)
        return _drain_progress(address, planned, record, facts, now) if record is not None else None


def _drain_progress(
    address: str, planned: NodePlan | None, record: _DrainRecord, facts: Facts, now: float
) -> DrainProgress:
    migrations = _increase_since(record.migrations_at_start, facts.migrations.get(address, {}))
    left = session_count(address, planned.endpoint, facts) if planned is not None else None
    elapsed_seconds = max((now if record.emptied_at is None else record.emptied_at) - record.started_at, 0.0)
    reports = [report.nodes[address] for report in facts.module_reports.values() if address in report.nodes]
    not_movable = {why: count for why, count in sum_traffic(reports).not_movable.items() if count}
    return DrainProgress(
        since=record.started_at,
        elapsed_seconds=elapsed_seconds,
        sessions_left=left,
        moved=sum(migrations_by_reason(migrations, MOVED).values()),
        failed=MappingProxyType(migrations_by_reason(migrations, FAILED)),
        lost=sum(migrations_by_reason(migrations, LOST).values()),
        not_movable=MappingProxyType(not_movable),
        seconds_left=_estimate_seconds_left(left, sum(not_movable.values()), record, elapsed_seconds, now),
        had_sessions=bool(record.max_sessions or migrations),
    )


def _increase_since(before: MigrationCounts, now: MigrationCounts) -> MigrationCounts:
    increases = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in increases.items() if count > 0}


def _estimate_seconds_left(
    left: int | None, not_movable: int, record: _DrainRecord, elapsed_seconds: float, now: float
) -> float | None:
    """How long those that can move would take at the pace so far.

    None: nothing is known, none can move, none has left yet, or none has for a while.
    """
    if left == 0:
        return 0.0
    if left is None or left <= not_movable or left >= record.max_sessions:
        return None
    if left >= record.last_sessions and now - record.last_decrease_at >= _STALL_SECONDS:
        return None
    return elapsed_seconds * (left - not_movable) / (record.max_sessions - left)

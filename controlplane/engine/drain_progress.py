"""What becomes of the sessions of nodes that are being left, from when that began."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from controlplane.decide.session_counts import sessions
from controlplane.model.facts import Facts
from controlplane.model.nodes import State
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.traffic import LOST, MOVED, STAYED, Moves, moves_by_reason, total
from controlplane.model.views import Departure

# Seconds without a session less after which the pace so far says nothing of those that are left.
_STILL = 5.0

_LEAVING = (State.DRAINING, State.DRAINED, State.GONE)


@dataclass(slots=True)
class _Record:
    """One node's."""

    began: float
    before: Moves  # counted by then
    most: int = 0  # sessions that it had when that was first known
    there: int = 0  # that it had last
    fell: float = 0.0  # when there was one less for the last time
    emptied: float | None = None  # when the last one was seen to have left
    is_told: bool = False  # that it has ended


class Departures:
    """The nodes that are being left, and those that were left and still are kept empty."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def follow(self, plan: Plan, facts: Facts, now: float) -> list[tuple[str, Departure]]:
        """Take over a new plan. Whose departure has ended with it, and what came of it."""
        ended = []
        for address in list(self._records):
            planned = plan.nodes.get(address)
            if planned is None or planned.state not in _LEAVING:
                record = self._records.pop(address)
                if not record.is_told:
                    ended.append((address, _departure(address, planned, record, facts, now)))
        for address, planned in plan.nodes.items():
            if planned.state not in _LEAVING:
                continue
            record = self._records.get(address) or self._records.setdefault(
                address, _Record(now, dict(facts.moves.get(address, {})))
            )
            there = sessions(address, planned.endpoint, facts)
            record.most = max(record.most, there or 0)
            if there is not None:
                record.fell = now if there < record.there else record.fell
                record.there = there
            if there != 0:
                record.emptied = None
            elif record.emptied is None:
                record.emptied = now
            if planned.state is not State.DRAINED:
                record.is_told = False
            elif not record.is_told:
                record.is_told = True
                ended.append((address, _departure(address, planned, record, facts, now)))
        return [(address, told) for address, told in ended if told.had_sessions]

    def of(self, planned: NodePlan, facts: Facts, now: float) -> Departure | None:
        """What has come of a node's sessions so far; None when it is not being left."""
        address = planned.node.address
        record = self._records.get(address)
        return _departure(address, planned, record, facts, now) if record is not None else None


def _departure(
    address: str, planned: NodePlan | None, record: _Record, facts: Facts, now: float
) -> Departure:
    moves = _since(record.before, facts.moves.get(address, {}))
    left = sessions(address, planned.endpoint, facts) if planned is not None else None
    elapsed = max((now if record.emptied is None else record.emptied) - record.began, 0.0)
    reports = [report.nodes[address] for report in facts.reports.values() if address in report.nodes]
    pinned = {why: count for why, count in total(reports).pinned.items() if count}
    return Departure(
        since=record.began,
        seconds=elapsed,
        left=left,
        moved=sum(moves_by_reason(moves, MOVED).values()),
        failed=MappingProxyType(moves_by_reason(moves, STAYED)),
        lost=sum(moves_by_reason(moves, LOST).values()),
        pinned=MappingProxyType(pinned),
        seconds_left=_estimate(left, sum(pinned.values()), record, elapsed, now),
        had_sessions=bool(record.most or moves),
    )


def _since(before: Moves, now: Moves) -> Moves:
    grown = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in grown.items() if count > 0}


def _estimate(left: int | None, pinned: int, record: _Record, elapsed: float, now: float) -> float | None:
    """How long those that can move would take at the pace so far.

    None: nothing is known, none can move, none has left yet, or none has for a while.
    """
    if left == 0:
        return 0.0
    if left is None or left <= pinned or left >= record.most:
        return None
    if left >= record.there and now - record.fell >= _STILL:
        return None
    return elapsed * (left - pinned) / (record.most - left)

"""Stores the statistics of statements of the last hour, of all Envoys. No I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.clock import Clock
from controlplane.model.statements import (
    MICROSECONDS,
    Rows,
    StatementCounts,
    StatementKey,
    StatementReport,
    StatementWindow,
    add_to,
)
from controlplane.observe.statements.row_limits import keep_largest, merge_rows

MAX_WINDOW_SECONDS = 3600
_SLOT_SECONDS, _RECENT_SLOTS, _MAX_ROWS_PER_SLOT = 10, 30, 2_000  # the last five minutes
_OLD_SLOT_SECONDS, _MAX_ROWS_PER_OLD_SLOT = 60, 1_500  # the rest of the hour
_MAX_TEXTS = 10_000
_MAX_PROCESSES = 10_000  # Envoy processes whose last sequence number is remembered


@dataclass(frozen=True, slots=True)
class _Slot:
    """The rows of a period. They are never changed, since readers may still use them."""

    start: int  # Unix seconds
    rows: Rows


class StatementStore:
    """Statistics by digest, user, node and Envoy, in slots of 10 s, or of 60 s if older than five minutes.

    Memory is bounded, whatever Envoys report: at most 31 slots with 2,200 rows and 57 with 1,700, so 165,000
    rows of less than 700 bytes (115 MB), and 10,000 texts of 2 KiB (20 MB). Each slot keeps the rows with the
    most time; the others are summed per node and Envoy. A report counts in the slot in which it arrives.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock()
        self._start = 0  # of the open slot
        self._open: dict[StatementKey, StatementCounts] = {}
        self._recent: deque[_Slot] = deque()  # oldest first
        self._old: deque[_Slot] = deque()  # oldest first
        self._texts: dict[str, str] = {}
        self._sequences: OrderedDict[str, int] = OrderedDict()  # by Envoy process, the latest one last

    def add(self, report: StatementReport) -> bool:
        """Store a report; return False if it, or a later one of the same process, is stored already."""
        if report.sequence <= self._sequences.get(report.instance, 0):
            return False
        self._sequences[report.instance] = report.sequence
        self._sequences.move_to_end(report.instance)
        if len(self._sequences) > _MAX_PROCESSES:
            self._sequences.popitem(last=False)
        self.advance()
        for key, counts in report.rows.items():
            add_to(self._open, key, counts)
        if len(self._open) > 2 * _MAX_ROWS_PER_SLOT:
            self._open = keep_largest(self._open, _MAX_ROWS_PER_SLOT)
        self._add_texts(report.texts)
        return True

    def advance(self) -> bool:
        """Close the slots that have ended; return whether there was one."""
        now = self._clock()
        start = int(now) // _SLOT_SECONDS * _SLOT_SECONDS
        if start == self._start:
            return False
        if self._open:
            self._recent.append(_Slot(self._start, keep_largest(self._open, _MAX_ROWS_PER_SLOT)))
            self._open = {}
        self._start = start
        while self._recent and self._recent[0].start < start - _RECENT_SLOTS * _SLOT_SECONDS:
            self._add_to_old(self._recent.popleft())
        while self._old and self._old[0].start + _OLD_SLOT_SECONDS <= now - MAX_WINDOW_SECONDS:
            self._old.popleft()
        return True

    def clear(self) -> None:
        """Delete all statistics."""
        self._open = {}
        for part in (self._recent, self._old, self._texts):
            part.clear()
        self._since = self._clock()

    def window(self, seconds: float) -> StatementWindow:
        """Return the statistics of at least the last `seconds`, as far as they are known."""
        self.advance()
        now = self._clock()
        oldest = now - seconds
        slots = [slot for slot in self._old if slot.start + _OLD_SLOT_SECONDS > oldest]
        slots += [slot for slot in self._recent if slot.start + _SLOT_SECONDS > oldest]
        since = oldest
        if slots and slots[0].start < oldest:
            since = slots[0].start
        since = max(since, self._since)
        return StatementWindow(
            since=since,
            seconds=max(now - since, 1.0),
            slots=(*(slot.rows for slot in slots), dict(self._open)),
            texts=MappingProxyType(dict(self._texts)),
        )

    def ranking(self) -> list[str]:
        """Return all digests in the closed slots of the last minutes, those with the most time first."""
        sums: dict[str, float] = {}
        for slot in self._recent:
            for key, counts in slot.rows.items():
                if key.digest:
                    sums[key.digest] = sums.get(key.digest, 0.0) + counts[MICROSECONDS]
        return sorted(sums, key=lambda digest: (-sums[digest], digest))

    def _add_to_old(self, slot: _Slot) -> None:
        start = slot.start // _OLD_SLOT_SECONDS * _OLD_SLOT_SECONDS
        rows = slot.rows
        if self._old and self._old[-1].start == start:
            rows = merge_rows(self._old.pop().rows, rows)
        self._old.append(_Slot(start, keep_largest(rows, _MAX_ROWS_PER_OLD_SLOT)))

    def _add_texts(self, texts: Mapping[str, str]) -> None:
        self._texts.update(texts)
        if len(self._texts) <= _MAX_TEXTS:
            return
        digests = {key.digest for slot in (*self._old, *self._recent) for key in slot.rows}
        digests |= {key.digest for key in self._open}
        used = [digest for digest in self._texts if digest in digests]
        self._texts = {digest: self._texts[digest] for digest in used[-_MAX_TEXTS // 2 :]}

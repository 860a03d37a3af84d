"""Collects the statistics of statements that Envoys report."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.clock import Clock
from controlplane.config.statements import StatementSettings
from controlplane.model.statements import StatementCounts, StatementReport, StatementWindow
from controlplane.observe.statements.store import StatementStore
from controlplane.observe.statements.top_statements import TopStatements


class StatementCollector:
    """Stores reports, and counts the statements that Prometheus sees."""

    def __init__(self, settings: StatementSettings, clock: Clock) -> None:
        self._settings = settings
        self._store = StatementStore(clock)
        self._top = TopStatements()

    @property
    def is_on(self) -> bool:
        return self._settings.is_on

    def configure(self, settings: StatementSettings) -> None:
        """Apply changed settings. All statistics are deleted when they are turned off."""
        if not (self.is_on and settings.is_on):
            self._store.clear()  # also when they are turned on, because they are complete only from now on
        self._settings = settings
        self._rank()

    def put(self, report: StatementReport) -> None:
        """Store a report, unless it is stored already or the statistics are off."""
        if not self.is_on:
            return
        self._advance()
        if self._store.add(report):
            self._top.add(report.rows)

    def window(self, seconds: float) -> StatementWindow:
        """Return the statistics of at least the last `seconds`, as far as they are known."""
        self._advance()
        return self._store.window(seconds)

    def top_totals(self) -> Mapping[str, StatementCounts]:
        """Return the counters of the statements with the most time, by digest."""
        self._advance()
        return self._top.totals

    def _advance(self) -> None:
        if self._store.advance():
            self._rank()

    def _rank(self) -> None:
        self._top.update(self._store.ranking(), self._settings.metrics_digests if self.is_on else 0)

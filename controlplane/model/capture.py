"""A capture of the traffic of clients: what an operator has requested, and what Envoys report. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DURATION_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Capture:
    """A request to capture traffic. Each capture has its own `until`, which identifies it in reports."""

    name: str
    started_at: float
    until: float  # rounded to milliseconds
    envoys: tuple[str, ...] = ()  # ids; empty: all
    users: tuple[str, ...] = ()  # empty: all
    groups: tuple[str, ...] = ()  # empty: all
    stopped_at: float | None = None  # None: it ends at `until`

    def is_running(self, now: float) -> bool:
        return self.stopped_at is None and now < self.until

    def applies_to(self, envoy: str) -> bool:
        """Whether this Envoy captures."""
        return not self.envoys or envoy in self.envoys

    @property
    def until_ms(self) -> int:
        return round(self.until * 1000)


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """What an Envoy process reports of its present or last capture, since the start of that capture."""

    until_ms: int = 0  # identifies the capture; Unix time in milliseconds
    is_active: bool = False
    records: int = 0
    dropped: int = 0  # records that are missing
    filtered: int = 0  # statements that were left out, because they hold secrets
    bytes: int = 0  # written to files
    write_errors: int = 0


CAPTURE_COUNTS = ("records", "dropped", "filtered", "bytes", "write_errors")
"""The fields of `CaptureCounts` that are counts."""

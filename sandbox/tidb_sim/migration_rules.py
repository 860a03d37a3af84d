"""How a simulated server migrates sessions: the settings that apply to all sessions."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sandbox.tidb_sim.session_token import Signer


@dataclass(frozen=True)
class MigrationRules:
    """Times in seconds. `rejects_set_states`: SET SESSION_STATES is unknown, as to an older version.

    `show_changes_row_count`: SHOW SESSION_STATES changes ROW_COUNT() and FOUND_ROWS(), as any other SHOW;
    whether it does in TiDB is not known, so a proxy must handle both. `clock_skew_seconds`: how far our clock
    is ahead.
    """

    export_delay_seconds: float = 0.0
    """Delay before SHOW SESSION_STATES answers."""
    rejects_set_states: bool = False
    show_changes_row_count: bool = False
    clock_skew_seconds: float = 0.0
    signer: Signer | None = None
    """Read from its files when the simulated server starts."""

    def now_nanoseconds(self) -> int:
        """Return the time of our clock: nanoseconds since 1970."""
        return time.time_ns() + int(self.clock_skew_seconds * 1e9)

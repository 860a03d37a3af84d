"""Settings of session migration that apply to all sessions of a simulated server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sandbox.tidb_sim.session_token import Signer


@dataclass(frozen=True)
class MigrationRules:
    """Times in seconds. `rejects_set_states`: SET SESSION_STATES fails as in a TiDB that does not know it.

    `show_changes_row_count`: SHOW SESSION_STATES changes ROW_COUNT() and FOUND_ROWS(), as any other SHOW
    does. It is unknown whether TiDB does this, so a proxy must handle both. `clock_skew_seconds`: how far
    this server's clock is ahead.
    """

    export_delay_seconds: float = 0.0  # Delay before SHOW SESSION_STATES answers.
    rejects_set_states: bool = False
    show_changes_row_count: bool = False
    clock_skew_seconds: float = 0.0
    signer: Signer | None = None  # Loaded when the simulated server starts.

    def now_nanoseconds(self) -> int:
        """Return this server's time in nanoseconds since 1970."""
        return time.time_ns() + int(self.clock_skew_seconds * 1e9)

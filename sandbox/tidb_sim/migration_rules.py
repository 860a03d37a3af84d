"""How a stand-in moves sessions: what is the same for all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sandbox.tidb_sim.session_token import Signer


@dataclass(frozen=True)
class MigrationRules:
    """Times in seconds. `refuse`: SET SESSION_STATES is unknown, as to an older version.

    `disturb`: SHOW SESSION_STATES changes ROW_COUNT() and FOUND_ROWS(), as any other SHOW; whether it does in
    TiDB is not known, so a proxy must stand both. `clock_skew`: how far our clock is ahead of the others'.
    """

    export_delay_seconds: float = 0.0
    """Before SHOW SESSION_STATES answers."""
    rejects_set_states: bool = False
    show_changes_row_count: bool = False
    clock_skew_seconds: float = 0.0
    signer: Signer | None = None
    """Read from its files when the stand-in starts."""

    def now_nanoseconds(self) -> int:
        """What our clock says: nanoseconds since 1970."""
        return time.time_ns() + int(self.clock_skew_seconds * 1e9)

"""Rules that a correct proxy never violates when it migrates a session. No I/O."""

from __future__ import annotations

import re

from sandbox.tidb_sim.packets import MySqlCommand

SET_SESSION_STATES = re.compile(rb"(?is)\s*set\s+session_states\b")  # Matches the start of the statement.

_SET_SESSION_VARIABLE = re.compile(
    rb"(?is)\s*set\s+(?!global\b|persist|password\b|role\b|default\b|transaction\b|statement\b|@[^@])"
    rb"(?!.*\bglobal\b)[^;]*;?\s*\0?\Z"
)


class ProxyRuleChecker:
    """Checks the migrations of one session. `awaits_states`: from a login by token to SET SESSION_STATES."""

    def __init__(self, *, by_token: bool) -> None:
        self.awaits_states = by_token
        self._may_set_states = by_token
        self._restored = False

    def check_request(self, payload: bytes) -> str | None:
        """Return how a request violates the rules while `awaits_states` is true; None if it does not."""
        if payload[0] == MySqlCommand.QUIT:
            return None
        if payload[0] == MySqlCommand.QUERY:
            if SET_SESSION_STATES.match(payload, 1) or _SET_SESSION_VARIABLE.match(payload, 1):
                return None
            return f"{payload[1:41]!r} between a login by token and SET SESSION_STATES"
        return f"command {payload[0]} between a login by token and SET SESSION_STATES"

    def record_export(self) -> None:
        """Record that SHOW SESSION_STATES returned states."""
        self._may_set_states = True

    def check_set_states(self) -> str | None:
        self.awaits_states = False
        if self._may_set_states:
            return None
        return "SET SESSION_STATES in a session that has neither logged in by token nor shown its states"

    def check_repeated_restore(self, *, is_complete: bool) -> str | None:
        """Return a violation if a whole session (`is_complete`) is restored twice. Other states may be."""
        is_repeated = is_complete and self._restored
        self._restored = self._restored or is_complete
        return "a whole session's states for the second time on one connection" if is_repeated else None

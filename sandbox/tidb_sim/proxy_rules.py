"""Rules that a correct proxy never violates when it migrates a session.

Pure; a violation is returned as text.
"""

from __future__ import annotations

import re

from sandbox.tidb_sim.packets import MySqlCommand

SET_SESSION_STATES = re.compile(rb"(?is)\s*set\s+session_states\b")
"""Matches the start of the statement."""

_SET_SESSION_VARIABLE = re.compile(
    rb"(?is)\s*set\s+(?!global\b|persist|password\b|role\b|default\b|transaction\b|statement\b|@[^@])"
    rb"(?!.*\bglobal\b)[^;]*;?\s*\0?\Z"
)


class ProxyRuleChecker:
    """The migrations of one session. `awaits_states`: it logged in by token and has no states yet."""

    def __init__(self, *, by_token: bool) -> None:
        self.awaits_states = by_token
        self._may_set_states = by_token
        self._restored = False

    def check_request(self, payload: bytes) -> str | None:
        """Check a request while `awaits_states`; the start of a long one is enough."""
        if payload[0] == MySqlCommand.QUIT:
            return None
        if payload[0] == MySqlCommand.QUERY:
            if SET_SESSION_STATES.match(payload, 1) or _SET_SESSION_VARIABLE.match(payload, 1):
                return None
            return f"{payload[1:41]!r} between a login by token and SET SESSION_STATES"
        return f"command {payload[0]} between a login by token and SET SESSION_STATES"

    def states_exported(self) -> None:
        """Record that SHOW SESSION_STATES returned states."""
        self._may_set_states = True

    def check_set_states(self) -> str | None:
        """Check a SET SESSION_STATES."""
        self.awaits_states = False
        if self._may_set_states:
            return None
        return "SET SESSION_STATES in a session that has neither logged in by token nor shown its states"

    def check_restored(self, *, is_complete: bool) -> str | None:
        """Check restored states: those of a whole session, or (not `is_complete`) a few of them."""
        is_repeated = is_complete and self._restored
        self._restored = self._restored or is_complete
        return "a whole session's states for the second time on one connection" if is_repeated else None

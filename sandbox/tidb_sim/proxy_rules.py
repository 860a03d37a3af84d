"""What a correct proxy never does with a session that moves. Pure; each breach is told as a sentence."""

from __future__ import annotations

import re

from sandbox.tidb_sim.packets import MySqlCommand

SET_SESSION_STATES = re.compile(rb"(?is)\s*set\s+session_states\b")
"""How the statement begins."""

_SET_SESSION_VARIABLE = re.compile(
    rb"(?is)\s*set\s+(?!global\b|persist|password\b|role\b|default\b|transaction\b|statement\b|@[^@])"
    rb"(?!.*\bglobal\b)[^;]*;?\s*\0?\Z"
)


class ProxyRuleChecker:
    """One session's moves so far. `waiting`: it logged in by token, and its states have not come yet."""

    def __init__(self, *, by_token: bool) -> None:
        self.awaits_states = by_token
        self._may_set_states = by_token
        self._restored = False

    def check_request(self, payload: bytes) -> str | None:
        """A request while `waiting`; of a long one the beginning is enough."""
        if payload[0] == MySqlCommand.QUIT:
            return None
        if payload[0] == MySqlCommand.QUERY:
            if SET_SESSION_STATES.match(payload, 1) or _SET_SESSION_VARIABLE.match(payload, 1):
                return None
            return f"{payload[1:41]!r} between a login by token and SET SESSION_STATES"
        return f"command {payload[0]} between a login by token and SET SESSION_STATES"

    def states_exported(self) -> None:
        """SHOW SESSION_STATES was answered with states."""
        self._may_set_states = True

    def check_set_states(self) -> str | None:
        """SET SESSION_STATES came."""
        self.awaits_states = False
        if self._may_set_states:
            return None
        return "SET SESSION_STATES in a session that has neither logged in by token nor shown its states"

    def check_restored(self, *, is_complete: bool) -> str | None:
        """It was a whole session's states, or (not `full`) a few of them."""
        is_repeated = is_complete and self._restored
        self._restored = self._restored or is_complete
        return "a whole session's states for the second time on one connection" if is_repeated else None

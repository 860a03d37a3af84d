"""What a correct proxy never does with a session that moves. Pure; each breach is told as a sentence."""

from __future__ import annotations

import re

from sandbox.tidb_sim.packets import Command

SET_STATES = re.compile(rb"(?is)\s*set\s+session_states\b")
"""How the statement begins."""

_SETS_VARIABLES = re.compile(
    rb"(?is)\s*set\s+(?!global\b|persist|password\b|role\b|default\b|transaction\b|statement\b|@[^@])"
    rb"(?!.*\bglobal\b)[^;]*;?\s*\0?\Z"
)


class Conduct:
    """One session's moves so far. `waiting`: it logged in by token, and its states have not come yet."""

    def __init__(self, *, by_token: bool) -> None:
        self.waiting = by_token
        self._may_set = by_token
        self._filled = False

    def request(self, payload: bytes) -> str | None:
        """A request while `waiting`; of a long one the beginning is enough."""
        if payload[0] == Command.QUIT:
            return None
        if payload[0] == Command.QUERY:
            if SET_STATES.match(payload, 1) or _SETS_VARIABLES.match(payload, 1):
                return None
            return f"{payload[1:41]!r} between a login by token and SET SESSION_STATES"
        return f"command {payload[0]} between a login by token and SET SESSION_STATES"

    def shown(self) -> None:
        """SHOW SESSION_STATES was answered with states."""
        self._may_set = True

    def set(self) -> str | None:
        """SET SESSION_STATES came."""
        self.waiting = False
        if self._may_set:
            return None
        return "SET SESSION_STATES in a session that has neither logged in by token nor shown its states"

    def filled(self, *, full: bool) -> str | None:
        """It was a whole session's states, or (not `full`) a few of them."""
        again = full and self._filled
        self._filled = self._filled or full
        return "a whole session's states for the second time on one connection" if again else None

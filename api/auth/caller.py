"""Who calls the REST API, and what that caller may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ANONYMOUS = "anonymous"


class CallerRole(Enum):
    """What a caller may do. A viewer reads; an operator also changes."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Where nobody is asked who is calling, everybody is the operator `anonymous`."""

    name: str  # of the token or the client certificate, as the configuration has it
    role: CallerRole
    client_ip: str  # the peer's IP address; empty when there is none

    @property
    def may_write(self) -> bool:
        """Whether it may change anything."""
        return self.role is CallerRole.OPERATOR

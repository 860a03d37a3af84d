"""The caller of the REST API and its role."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ANONYMOUS = "anonymous"


class CallerRole(Enum):
    """The permissions of a caller. A viewer can only read; an operator can also write."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Without authentication, every caller is the operator `anonymous`."""

    name: str  # of the token or the client certificate in the configuration
    role: CallerRole
    client_ip: str  # the peer's IP address; empty when there is none

    @property
    def may_write(self) -> bool:
        """Whether the caller may send write requests."""
        return self.role is CallerRole.OPERATOR

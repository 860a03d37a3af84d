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

    name: str  # the name of the token or client certificate in the configuration
    role: CallerRole
    client_ip: str = ""  # empty if unknown
    by_cookie: bool = False  # browsers send cookies automatically, also with requests of cross-origin pages

    @property
    def may_write(self) -> bool:
        """Whether the caller may send write requests."""
        return self.role is CallerRole.OPERATOR

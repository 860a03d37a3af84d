"""Live sessions: what an Envoy's module reports when it is asked. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SessionState = Literal["idle", "busy", "transaction", "login", "opaque", "moving"]


@dataclass(frozen=True, slots=True)
class Session:
    """A client's connection through an Envoy."""

    envoy: str
    instance: str  # the Envoy process
    connection: int  # unique within the Envoy process
    id: int  # connection id that the client got in its handshake; 0: it has got none
    node_id: int  # connection id at the present node; 0: it has none
    client: str  # address and port
    user: str
    database: str
    node: str  # empty: it has no node
    state: SessionState
    seconds_in_state: float
    logged_in_seconds: float | None  # since its login; None: it still logs in
    moves: int
    digest: str  # of the statement that runs; empty: none, or it is not known
    text: str  # of that statement, normalized

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the session in the fleet."""
        return (self.instance, self.connection)


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Which sessions are wanted. None: all."""

    user: str | None = None
    node: str | None = None
    envoy: str | None = None
    client: str | None = None  # IP address, or address and port
    limit: int = 100


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The answer of one Envoy process to one command."""

    envoy: str
    instance: str
    is_incomplete: bool  # not all of its workers have answered in time
    sessions: tuple[Session, ...]
    total: int  # sessions that match, also those beyond the limit


@dataclass(frozen=True, slots=True)
class SessionListing:
    """The sessions that match a query. `incomplete`: what is missing, one clause each."""

    sessions: Sequence[Session]
    total: int
    incomplete: tuple[str, ...]

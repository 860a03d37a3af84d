"""Schemas of live sessions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import Field, StringConstraints

from api.schemas.common import ResponseModel, StrictQuery
from controlplane.model.sessions import Session, SessionListing, SessionQuery, SessionState
from controlplane.sessions.messages import MAX_SESSIONS_PER_ENVOY

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
MAX_ID = 2**64 - 1


class SessionListQuery(StrictQuery):
    """Which sessions a response lists."""

    user: Name | None = Field(None, description="Only sessions of this user.")
    node: Name | None = Field(None, description="Only sessions on this node.")
    envoy: Name | None = Field(None, description="Only sessions through this Envoy.")
    client: Name | None = Field(None, description="Only sessions from this IP address, or `address:port`.")
    limit: int = Field(100, ge=1, le=MAX_SESSIONS_PER_ENVOY, description="The highest number of sessions.")

    @property
    def as_query(self) -> SessionQuery:
        return SessionQuery(**self.model_dump())


class EndSessionQuery(StrictQuery):
    """Which session ends."""

    envoy: Name | None = Field(None, description="Only a session through this Envoy.")


class SessionDetails(ResponseModel):
    """A client's connection through an Envoy."""

    id: int | None = Field(description="Connection id that the client got in its handshake.")
    node_id: int | None = Field(description="Connection id at the node where the session is now.")
    envoy: str
    client: str = Field(description="Address and port of the client.")
    user: str | None
    database: str | None
    node: str | None = Field(description="Null: the login waits for a node.")
    state: SessionState = Field(
        description="`transaction`: open, and no statement runs. `moving`: on its way to another node."
        " `opaque`: the module cannot follow the protocol of the session."
    )
    seconds: float = Field(description="How long the session has been in this state.")
    since: datetime | None = Field(description="When the client logged in; null: it still logs in.")
    moves: int = Field(description="How often it has moved to another node.")
    digest: str | None = Field(
        description="Digest of the statement that runs, if `statements.digests` is on."
    )
    text: str | None = Field(description="That statement without its values, at most 512 bytes.")

    @classmethod
    def read(cls, session: Session, now: datetime) -> SessionDetails:
        logged_in = session.logged_in_seconds
        return cls.model_validate(
            {
                "id": session.id or None,
                "node_id": session.node_id or None,
                "envoy": session.envoy,
                "client": session.client,
                "user": session.user or None,
                "database": session.database or None,
                "node": session.node or None,
                "state": session.state,
                "seconds": session.seconds_in_state,
                "since": None if logged_in is None else now - timedelta(seconds=logged_in),
                "moves": session.moves,
                "digest": session.digest or None,
                "text": session.text or None,
            }
        )


class SessionList(ResponseModel):
    """Sessions of the fleet: busy ones first, those that have been busy longest at the top."""

    total: int = Field(description="Matching sessions, also those beyond `limit`.")
    sessions: list[SessionDetails]
    incomplete: list[str] = Field(description="What is missing, a clause each.")


def build_session_list(listing: SessionListing, now: float) -> SessionList:
    """Return the response for a listing that was made at the time `now`."""
    at = datetime.fromtimestamp(now, UTC)
    return SessionList(
        total=listing.total,
        sessions=[SessionDetails.read(session, at) for session in listing.sessions],
        incomplete=list(listing.incomplete),
    )

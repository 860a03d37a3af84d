"""Builds commands for Envoys, and reads their results. No I/O."""

from __future__ import annotations

from typing import Any, get_args

from controlplane.model.sessions import Session, SessionQuery, SessionResult, SessionState
from controlplane.module_calls import InvalidModuleMessage
from controlplane.sessions import commands_pb2

_DIGEST_BYTES = 32
MAX_SESSIONS_PER_ENVOY = 10_000
_STATES = frozenset(get_args(SessionState))
_MAX_MILLISECONDS = 10**12  # so that times stay within the range of dates
_MAX_NAME_BYTES, _MAX_TEXT_BYTES = 1_024, 512


def list_command(id_: int, query: SessionQuery) -> Any:
    """Return the command that lists sessions. The Envoy of the query is not part of it."""
    wanted = commands_pb2.ListSessions(
        user=query.user or "", node=query.node or "", client=query.client or "", limit=query.limit
    )
    return commands_pb2.Command(id=id_, list=wanted)


def find_command(id_: int, session_id: int) -> Any:
    """Return the command that finds the sessions with this id; they do not move for 3 s."""
    return commands_pb2.Command(id=id_, find=commands_pb2.FindSessions(id=session_id))


def end_command(id_: int, session: Session) -> Any:
    """Return the command that ends a session."""
    ended = commands_pb2.EndSession(connection=session.connection)
    return commands_pb2.Command(id=id_, instance=session.instance, end=ended)


def read_result(message: Any, envoy: str, instance: str) -> SessionResult:
    """Check a `Result` of this Envoy process and convert it. Raises InvalidModuleMessage."""
    if len(message.sessions) > MAX_SESSIONS_PER_ENVOY:
        raise InvalidModuleMessage(f"it has more than {MAX_SESSIONS_PER_ENVOY} sessions")
    sessions = tuple(_read_session(session, envoy, instance) for session in message.sessions)
    return SessionResult(
        envoy, instance, message.is_incomplete, sessions, total=max(message.total, len(sessions))
    )


def _read_session(message: Any, envoy: str, instance: str) -> Session:
    names = (message.client, message.user, message.database, message.node)
    if max(len(name.encode()) for name in names) > _MAX_NAME_BYTES:
        raise InvalidModuleMessage(f"a name has more than {_MAX_NAME_BYTES} bytes")
    if message.state not in _STATES:
        raise InvalidModuleMessage("a session has an unknown state")
    if len(message.text.encode()) > _MAX_TEXT_BYTES or len(message.digest) not in (0, _DIGEST_BYTES):
        raise InvalidModuleMessage("a statement is too long, or its digest does not have 32 bytes")
    has_login = message.HasField("milliseconds_logged_in")
    return Session(
        envoy=envoy,
        instance=instance,
        connection=message.connection,
        id=message.id,
        node_id=message.node_id,
        client=message.client,
        user=message.user,
        database=message.database,
        node=message.node,
        state=message.state,
        seconds_in_state=_seconds(message.milliseconds_in_state),
        logged_in_seconds=_seconds(message.milliseconds_logged_in) if has_login else None,
        moves=message.moves,
        digest=message.digest.hex(),
        text=message.text,
    )


def _seconds(milliseconds: int) -> float:
    return min(milliseconds, _MAX_MILLISECONDS) / 1000

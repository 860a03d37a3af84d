"""Decides which session an id means: the id in a client's handshake, or that at its present node. No I/O.

A node may give the id of a session that has left it to a new session. So one id may mean two sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from controlplane.model.sessions import Session

_STATE_ORDER = {"busy": 0, "transaction": 1}
_MAX_NAMED = 3
_MAX_TEXT_CHARS = 400  # MySQL clients keep 511 bytes of an error text


@dataclass(frozen=True, slots=True)
class KillDecision:
    """How a KILL passes. `node_id` 0: with its own id. `refusal` empty: it passes."""

    node_id: int = 0
    refusal: str = ""


def sessions_with_id(id_: int, sessions: Iterable[Session]) -> list[Session]:
    """Return the sessions that an id may mean, each once, those with this id in their handshake first."""
    matching = {session.key: session for session in sessions if id_ in (session.id, session.node_id)}
    return sorted(matching.values(), key=lambda session: (session.id != id_, session.key))


def decide_kill(id_: int, sessions: Iterable[Session], incomplete: Collection[str]) -> KillDecision:
    """Decide how a KILL of this id passes. `incomplete`: who has not told its sessions, one clause each."""
    if incomplete:
        reason = _cut("; ".join(incomplete))
        return KillDecision(
            refusal=f"Tidevoy: it is not certain which session has the id {id_}, because {reason}; try again"
        )
    found = sessions_with_id(id_, sessions)
    if not found:
        return KillDecision()  # perhaps a connection without Tidevoy
    if len(found) > 1:
        return KillDecision(refusal=f"Tidevoy: {describe_ambiguity(id_, found)}")
    (session,) = found
    if session.id != id_ or session.node_id == id_:
        return KillDecision()
    if not session.node_id:
        return KillDecision(refusal=f"Tidevoy: the session {id_} has no TiDB server at the moment; try again")
    return KillDecision(node_id=session.node_id)


def describe_ambiguity(id_: int, sessions: Sequence[Session]) -> str:
    """Return that an id means several sessions, with the ids that distinguish them."""
    named = " and ".join(
        f"connection {session.node_id} of {session.node or 'no server'} (id {session.id} at its login)"
        for session in sessions[:_MAX_NAMED]
    )
    more = f" and {len(sessions) - _MAX_NAMED} more" if len(sessions) > _MAX_NAMED else ""
    return (
        f"the id {id_} means {len(sessions)} sessions: {_cut(named + more)}; use an id that only one of them"
        " has"
    )


def merge_sessions(sessions: Iterable[Session], limit: int) -> list[Session]:
    """Return the sessions in the order of the modules: those that have been busy longest come first."""
    unique = {session.key: session for session in sessions}

    def order(session: Session) -> tuple[int, float, str, int]:
        rank = _STATE_ORDER.get(session.state, len(_STATE_ORDER))
        is_used = rank < len(_STATE_ORDER)
        return (rank, -session.seconds_in_state if is_used else session.seconds_in_state, *session.key)

    return sorted(unique.values(), key=order)[:limit]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 3]}..."

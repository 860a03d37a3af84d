"""Decides which session a connection id means. No I/O.

The id may come from the client's handshake or from the session's present node.
A node may give the id of a session that has left it to a new session. So one id may mean two sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from controlplane.model.sessions import Session
from controlplane.texts import some_of

_MAX_TEXT_CHARS = 400  # MySQL clients keep 511 bytes of an error text


@dataclass(frozen=True, slots=True)
class KillDecision:
    """`node_id` replaces the id of the KILL; 0: it stays. `refusal`: the error; empty: there is none."""

    node_id: int = 0
    refusal: str = ""


def sessions_with_id(id_: int, sessions: Iterable[Session]) -> list[Session]:
    """Return the sessions that an id may mean, each once, those with this id in their handshake first."""
    matching = {session.key: session for session in sessions if id_ in (session.id, session.node_id)}
    return sorted(matching.values(), key=lambda session: (session.id != id_, session.key))


def decide_kill(id_: int, sessions: Iterable[Session], incomplete: Collection[str]) -> KillDecision:
    """Decide which session a KILL of this id means.

    `incomplete`: for each Envoy or control plane whose sessions are unknown, a clause that says why.
    """
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
    names = [
        f"connection {session.node_id} of {session.node or 'no server'} (id {session.id} at its login)"
        for session in sessions
    ]
    named = _cut(some_of(names, separator=" and "))
    return f"the id {id_} means {len(sessions)} sessions: {named}; use an id that only one of them has"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 3]}..."

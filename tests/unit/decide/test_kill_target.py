"""Which session the id in a KILL means."""

from __future__ import annotations

import pytest

from controlplane.decide.kill_target import (
    KillDecision,
    decide_kill,
    describe_ambiguity,
    sessions_with_id,
)
from controlplane.model.sessions import Session
from tests.support.controlplane.session_module import session
from tests.support.controlplane.statement_reports import OTHER_INSTANCE

MOVED, STAYED, OTHER = session(1, 5, 77), session(2, 6), session(3, 8, 5, node="10.0.0.2:4000")


@pytest.mark.parametrize(
    ("sessions", "id_", "node_id"),
    [
        ([MOVED, STAYED], 5, 77),  # by the id of its handshake
        ([MOVED, STAYED], 77, 0),  # by its present id
        ([MOVED, STAYED], 6, 0),  # it has not moved
        ([MOVED, STAYED], 9, 0),  # perhaps a connection without Tidevoy
        ([OTHER], 5, 0),  # only by its present id
        ([MOVED, MOVED], 5, 77),  # one session, reported twice
        ([], 5, 0),
    ],
)
def test_kill_passes(sessions: list[Session], id_: int, node_id: int) -> None:
    assert decide_kill(id_, sessions, ()) == KillDecision(node_id)


@pytest.mark.parametrize(
    "other", [OTHER, session(3, 5, 8), session(3, 5), session(1, 5, instance=OTHER_INSTANCE)]
)
def test_ambiguous_kill_is_refused(other: Session) -> None:
    decision = decide_kill(5, [other, MOVED], ())
    assert decision.node_id == 0
    assert decision.refusal.startswith("Tidevoy: the id 5 means 2 sessions: connection ")
    assert "connection 77 of 10.0.0.1:4000 (id 5 at its login)" in decision.refusal
    assert f"connection {other.node_id} of {other.node} (id {other.id} at its login)" in decision.refusal


def test_kill_is_refused_if_not_all_have_answered() -> None:
    decision = decide_kill(5, [MOVED], ["edge-2 has not answered"])
    assert decision.node_id == 0
    assert "edge-2 has not answered; try again" in decision.refusal


def test_session_without_a_node_cannot_be_killed() -> None:
    assert "no TiDB server" in decide_kill(5, [session(1, 5, 0)], ()).refusal


def test_refusals_fit_into_the_error_of_a_client() -> None:
    long = [session(number, 5, number, node="n" * 250) for number in range(9)]
    for refusal in (decide_kill(5, [MOVED], ["x" * 999]).refusal, describe_ambiguity(5, long)):
        assert len(refusal) < 512
    assert "6 more" in describe_ambiguity(5, [session(number, 5) for number in range(9)])


def test_sessions_with_an_id_come_once_and_those_of_the_handshake_first() -> None:
    assert sessions_with_id(5, [OTHER, MOVED, STAYED, MOVED]) == [MOVED, OTHER]

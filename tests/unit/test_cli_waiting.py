"""When waiting for a drain is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.cli import waiting
from api.cli.client import Client, Missing, Unreachable
from api.cli.failure import Failure
from api.cli.waiting import outcome, until_drained


# An hour: tables are made when tests are collected, and those before this one take minutes.
def node(
    state: str,
    sessions: int | None,
    *,
    deadline_in: float | None = 3600.0,
    endpoint: str | None = "10.0.0.1:1",
) -> dict[str, Any]:
    deadline = None if deadline_in is None else datetime.now(UTC) + timedelta(seconds=deadline_in)
    return {
        "address": "a:1",
        "state": state,
        "endpoint": endpoint,
        "sessions": sessions,
        "reason": "healthy",
        "drain": deadline and {"deadline": deadline.isoformat()},
    }


@pytest.mark.parametrize(
    "seen",
    [
        node("draining", 3),
        node("draining", None),
        node("draining", 0),  # not every Envoy has confirmed the zero yet
        node("drained", None),  # no Envoy has reported
        node("gone", None),
        node("gone", None, deadline_in=None),
        node("gone", 3),
        node("gone", 3, deadline_in=None),
    ],
)
def test_waits_on(seen: dict[str, Any]) -> None:
    assert outcome(seen) is None


@pytest.mark.parametrize(
    "seen",
    [
        node("drained", 0),
        node("gone", 0, deadline_in=-1),
        node("drained", None, endpoint=None),  # its name never had an IP, so no Envoy could connect to it
    ],
)
def test_done(seen: dict[str, Any]) -> None:
    assert outcome(seen) == ""


def test_the_deadline_came() -> None:
    assert "still has sessions (3)" in (outcome(node("draining", 3, deadline_in=-1)) or "")
    assert "no Envoy has reported" in (outcome(node("drained", None, deadline_in=-1)) or "")


def test_somebody_took_the_drain_back() -> None:
    assert "taken back" in (outcome(node("active", 3, deadline_in=None)) or "")


class Answers(Client):
    """A client whose control plane answers, or fails, as listed."""

    def __init__(self, *answers: dict[str, Any] | BaseException) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answers = iter(answers)

    def get(self, path: str) -> Any:
        assert path == "/v1/nodes/a%3A1"
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_POLL", 0.0)


def test_a_restart_of_the_control_plane_does_not_disturb(capsys: pytest.CaptureFixture[str]) -> None:
    away = Unreachable("nobody answers")
    with Answers(node("draining", 2), away, away, node("drained", 0)) as client:
        until_drained(client, node("draining", 3))
    shown = capsys.readouterr()
    assert "a:1 is drained after" in shown.out
    assert shown.err.splitlines() == [
        "tidevoy: a:1 draining, sessions left: 3",
        "tidevoy: a:1 draining, sessions left: 2",
        "tidevoy: nobody answers; still trying",
    ]


def test_patience_with_a_control_plane_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_PATIENCE", -1.0)
    with Answers(Unreachable("nobody answers")) as client, pytest.raises(Unreachable):
        until_drained(client, node("draining", 3))


def test_a_node_that_is_forgotten_has_no_session_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Answers(Missing("no such node")) as client:
        until_drained(client, node("draining", 3))
    assert "is drained" in capsys.readouterr().out


def test_ctrl_c_leaves_the_drain_as_it_is() -> None:
    with Answers(KeyboardInterrupt()) as client, pytest.raises(Failure, match="the drain of a:1 goes on"):
        until_drained(client, node("draining", 3))

"""When waiting for a drain is over."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cli import progress
from cli.client import ControlPlaneUnreachable, NotFound
from cli.errors import CliError
from cli.progress import drain_result, wait_until_drained
from tests.support.controlplane.cli_process import FakeApiClient

NODE = "/v1/nodes/a%3A1"


# An hour: tables are made when tests are collected, and those before this one take minutes.
def node(
    state: str,
    sessions: int | None,
    *,
    deadline_in: float | None = 3600.0,
    endpoint: str | None = "10.0.0.1:1",
    closes: bool = False,
    advice: str | None = "DRAINING",
    **departure: Any,
) -> dict[str, Any]:
    deadline = None if deadline_in is None else datetime.now(UTC) + timedelta(seconds=deadline_in)
    return {
        "address": "a:1",
        "state": state,
        "endpoint": endpoint,
        "advice": advice,
        "sessions": sessions,
        "reason": "healthy",
        "drain": deadline
        and {"deadline": deadline.isoformat(), "on_deadline": "close" if closes else "keep"},
        "departure": {"moved": 0, "failed": {}, "not_movable": {}, "seconds_left": None} | departure
        if departure
        else None,
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
        node("gone", 0),  # nor this one
        node("gone", 0, deadline_in=None),
        node("gone", None, advice=None),
        node("gone", 3, advice=None),
        node("gone", 3),
        node("gone", 3, deadline_in=None),
    ],
)
def test_waits_on(seen: dict[str, Any]) -> None:
    assert drain_result(seen) is None


@pytest.mark.parametrize(
    "seen",
    [
        node("drained", 0),
        node("gone", 0, deadline_in=-1, advice=None),
        node("drained", None, endpoint=None),  # its name never had an IP, so no Envoy could connect to it
    ],
)
def test_done(seen: dict[str, Any]) -> None:
    assert drain_result(seen) == ""


def test_sessions_that_are_being_ended_are_waited_for() -> None:
    assert drain_result(node("draining", 3, deadline_in=-1, closes=True)) is None


def test_the_deadline_came() -> None:
    assert "still has sessions (3)" in (drain_result(node("draining", 3, deadline_in=-1)) or "")
    assert "(3, not movable: 2 (cursor 2))" in (
        drain_result(node("draining", 3, deadline_in=-1, not_movable={"cursor": 2})) or ""
    )
    late = drain_result(node("draining", 3, deadline_in=-61, closes=True)) or ""
    assert "still has sessions (3), although they are to be ended" in late
    assert "no Envoy has reported" in (drain_result(node("drained", None, deadline_in=-1)) or "")


def test_somebody_took_the_drain_back() -> None:
    assert "taken back" in (drain_result(node("active", 3, deadline_in=None)) or "")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_SECONDS", 0.0)


def test_a_restart_of_the_control_plane_does_not_disturb(capsys: pytest.CaptureFixture[str]) -> None:
    away = ControlPlaneUnreachable("nobody answers")
    with FakeApiClient(NODE, node("draining", 2), away, away, node("drained", 0)) as client:
        wait_until_drained(client, node("draining", 3))
    shown = capsys.readouterr()
    assert "a:1 is drained after" in shown.out
    assert shown.err.splitlines() == [
        "tidevoy: a:1 draining, sessions left: 3",
        "tidevoy: a:1 draining, sessions left: 2",
        "tidevoy: nobody answers; still trying",
    ]


def test_progress_shows_what_has_moved_and_what_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    cannot = {"transaction": 2, "cursor": 1}
    seen = [
        node("draining", 40, moved=60, failed={"slow": 2}, not_movable=cannot, seconds_left=8.2),
        node("draining", 40, moved=60, failed={"slow": 2}, not_movable=cannot, seconds_left=9.1),
        node("draining", 3, moved=97, failed={"slow": 2, "refused": 3}, not_movable=cannot, seconds_left=1.0),
        node("drained", 0, moved=98, failed={"slow": 2, "refused": 3}, seconds_left=0.0),
    ]
    with FakeApiClient(NODE, *seen) as client:
        wait_until_drained(client, node("draining", 100))
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "tidevoy: a:1 draining, sessions left: 100",
        "tidevoy: a:1 draining, sessions left: 40, moved: 60, failed: 2,"
        " not movable: 3 (cursor 1, transaction 2), about 0:08 left",
        "tidevoy: a:1 draining, sessions left: 3, moved: 97, failed: 5,"
        " not movable: 3 (cursor 1, transaction 2), about 0:01 left",
    ]
    assert shown.out.endswith("no session is left; moved: 98, failed: 5\n")


def test_progress_is_json_when_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [
        node("draining", 1, moved=1, seconds_left=5.0),
        node("draining", 1, moved=1, seconds_left=6.0),
        node("drained", 0, moved=2, failed={"slow": 1}, seconds_left=0.0),
    ]
    with FakeApiClient(NODE, *seen) as client:
        wait_until_drained(client, node("draining", 2), as_json=True)
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [(line["left"], line["moved"], line["seconds_left"]) for line in lines] == [
        (2, None, None),
        (1, 1, 5.0),
        (0, 2, 0.0),
    ]
    assert lines[-1] == {
        "address": "a:1",
        "state": "drained",
        "left": 0,
        "moved": 2,
        "failed": 1,
        "not_movable": {},
        "seconds_left": 0.0,
    }
    assert shown.err == ""


def test_patience_with_a_control_plane_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_OUTAGE_TIMEOUT_SECONDS", -1.0)
    with (
        FakeApiClient(NODE, ControlPlaneUnreachable("nobody answers")) as client,
        pytest.raises(ControlPlaneUnreachable),
    ):
        wait_until_drained(client, node("draining", 3))


def test_a_node_that_is_forgotten_has_no_session_left(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeApiClient(NODE, NotFound("no such node")) as client:
        wait_until_drained(client, node("draining", 3))
    assert "is drained" in capsys.readouterr().out


def test_ctrl_c_leaves_the_drain_as_it_is() -> None:
    with (
        FakeApiClient(NODE, KeyboardInterrupt()) as client,
        pytest.raises(CliError, match="the drain of a:1 goes on"),
    ):
        wait_until_drained(client, node("draining", 3))

"""Waiting for a drain: when it ends, and what it prints."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cli.client import ControlPlaneUnreachable, NotFound
from cli.drain_waiting import drain_result, wait_until_drained
from cli.errors import CliError
from tests.support.controlplane.cli_process import FakeApiClient

NODE = "/v1/nodes/a%3A1"


NOW = datetime.now(UTC)


# The deadline is an hour away, because `wait_until_drained` reads the clock minutes after NOW.
def node(
    state: str,
    sessions: int | None,
    *,
    deadline_in: float | None = 3600.0,
    endpoint: str | None = "10.0.0.1:1",
    closes: bool = False,
    eds_health: str | None = "DRAINING",
    **drain_progress: Any,
) -> dict[str, Any]:
    deadline = None if deadline_in is None else NOW + timedelta(seconds=deadline_in)
    return {
        "address": "a:1",
        "state": state,
        "endpoint": endpoint,
        "eds_health": eds_health,
        "sessions": sessions,
        "reason": "healthy",
        "drain": deadline
        and {"deadline": deadline.isoformat(), "on_deadline": "close" if closes else "keep"},
        "drain_progress": {"migrated": 0, "failed": {}, "not_movable": {}, "seconds_left": None}
        | drain_progress
        if drain_progress
        else None,
    }


def test_deadline_message_names_missing_envoys() -> None:
    reason = "drained by an operator; it waits for Envoys that are disconnected: e-1; the deadline has passed"
    message = drain_result({**node("draining", 0, deadline_in=-1.0), "reason": reason}, NOW)
    assert message is not None
    assert message.startswith(f"the deadline has passed, but a:1 may still have sessions: {reason}; ")


@pytest.mark.parametrize(
    "state",
    [
        node("draining", 3),
        node("draining", None),
        node("draining", 0),  # not yet confirmed by all Envoys
        node("drained", None),  # no Envoy has reported
        node("gone", None),
        node("gone", None, deadline_in=None),
        node("gone", 0),  # not yet confirmed by all Envoys
        node("gone", 0, deadline_in=None),
        node("gone", None, eds_health=None),
        node("gone", 3, eds_health=None),
        node("gone", 3),
        node("gone", 3, deadline_in=None),
    ],
)
def test_wait_continues_until_zero_is_confirmed(state: dict[str, Any]) -> None:
    assert drain_result(state, NOW) is None


@pytest.mark.parametrize(
    "final_state",
    [
        node("drained", 0),
        node("gone", 0, deadline_in=-1, eds_health=None),
        node("drained", None, endpoint=None),  # the name never resolved, so no Envoy could connect
    ],
)
def test_drain_is_done_without_sessions(final_state: dict[str, Any]) -> None:
    assert drain_result(final_state, NOW) == ""


def test_wait_continues_while_sessions_are_closed() -> None:
    assert drain_result(node("draining", 3, deadline_in=-1, closes=True), NOW) is None


def test_wait_fails_after_the_deadline() -> None:
    assert "still has sessions (3)" in (drain_result(node("draining", 3, deadline_in=-1), NOW) or "")
    assert "(3, not movable: 2 (cursor 2))" in (
        drain_result(node("draining", 3, deadline_in=-1, not_movable={"cursor": 2}), NOW) or ""
    )
    after_grace = drain_result(node("draining", 3, deadline_in=-61, closes=True), NOW) or ""
    assert "still has sessions (3), although they should be closed" in after_grace
    assert "no Envoy has reported" in (drain_result(node("drained", None, deadline_in=-1), NOW) or "")


def test_wait_fails_when_the_drain_is_cancelled() -> None:
    assert "was cancelled" in (drain_result(node("active", 3, deadline_in=None), NOW) or "")


@pytest.fixture(autouse=True)
def _poll_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.client._POLL_SECONDS", 0.0)


def test_wait_continues_while_the_control_plane_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    outage = ControlPlaneUnreachable("no answer")
    with FakeApiClient(NODE, node("draining", 2), outage, outage, node("drained", 0)) as client:
        wait_until_drained(client, node("draining", 3))
    output = capsys.readouterr()
    assert "a:1 is drained after" in output.out
    assert output.err.splitlines() == [
        "tidevoy: a:1 draining, sessions left: 3",
        "tidevoy: a:1 draining, sessions left: 2",
        "tidevoy: no answer; retrying",
    ]


def test_progress_names_missing_envoys(capsys: pytest.CaptureFixture[str]) -> None:
    reason = (
        "drained by an operator; it waits for Envoys that are disconnected and may have sessions on it: e-1"
    )
    with FakeApiClient(NODE, node("drained", 0)) as client:
        wait_until_drained(client, {**node("draining", 0), "reason": reason})
    assert capsys.readouterr().err.splitlines() == [
        f"tidevoy: a:1 draining, sessions left: 0 ({reason})",
    ]


def test_progress_counts_migrated_and_unmovable_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    not_movable = {"transaction": 2, "cursor": 1}
    responses = [
        node("draining", 40, migrated=60, failed={"slow": 2}, not_movable=not_movable, seconds_left=8.2),
        node("draining", 40, migrated=60, failed={"slow": 2}, not_movable=not_movable, seconds_left=9.1),
        node(
            "draining",
            3,
            migrated=97,
            failed={"slow": 2, "refused": 3},
            not_movable=not_movable,
            seconds_left=1.0,
        ),
        node("drained", 0, migrated=98, failed={"slow": 2, "refused": 3}, seconds_left=0.0),
    ]
    with FakeApiClient(NODE, *responses) as client:
        wait_until_drained(client, node("draining", 100))
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "tidevoy: a:1 draining, sessions left: 100",
        "tidevoy: a:1 draining, sessions left: 40, migrated: 60, failed: 2,"
        " not movable: 3 (cursor 1, transaction 2), about 0:08 left",
        "tidevoy: a:1 draining, sessions left: 3, migrated: 97, failed: 5,"
        " not movable: 3 (cursor 1, transaction 2), about 0:01 left",
    ]
    assert output.out.endswith("no session is left; migrated: 98, failed: 5\n")


def test_progress_prints_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    responses = [
        node("draining", 1, migrated=1, seconds_left=5.0),
        node("draining", 1, migrated=1, seconds_left=6.0),
        node("drained", 0, migrated=2, failed={"slow": 1}, seconds_left=0.0),
    ]
    with FakeApiClient(NODE, *responses) as client:
        wait_until_drained(client, node("draining", 2), as_json=True)
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [(line["left"], line["migrated"], line["seconds_left"]) for line in lines] == [
        (2, None, None),
        (1, 1, 5.0),
        (0, 2, 0.0),
    ]
    assert lines[-1] == {
        "address": "a:1",
        "state": "drained",
        "left": 0,
        "migrated": 2,
        "failed": 1,
        "not_movable": {},
        "seconds_left": 0.0,
    }
    assert output.err == ""


def test_wait_fails_after_a_long_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.client._OUTAGE_TIMEOUT_SECONDS", -1.0)
    with (
        FakeApiClient(NODE, ControlPlaneUnreachable("no answer")) as client,
        pytest.raises(ControlPlaneUnreachable),
    ):
        wait_until_drained(client, node("draining", 3))


def test_removed_node_counts_as_drained(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeApiClient(NODE, NotFound("no such node")) as client:
        wait_until_drained(client, node("draining", 3))
    assert "is drained" in capsys.readouterr().out


def test_ctrl_c_does_not_cancel_the_drain() -> None:
    with (
        FakeApiClient(NODE, KeyboardInterrupt()) as client,
        pytest.raises(CliError, match="the drain of a:1 continues"),
    ):
        wait_until_drained(client, node("draining", 3))

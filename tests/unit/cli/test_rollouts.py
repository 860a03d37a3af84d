"""Output of `tidevoy rollout`, and when waiting for a rollout ends."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from cli.client import ControlPlaneUnreachable
from cli.errors import CliError
from cli.rollouts import (
    changes_since,
    plan_lines,
    rollout_result,
    rollout_row,
    step_row,
    summary_line,
    wait_until_finished,
)
from tests.support.controlplane.cli_process import FakeApiClient

ROLLOUT = "/v1/rollouts/r-1"

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def step(address: str, stage: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {
        "address": address,
        "stage": stage,
        "reason": reason,
        "drain_requested_at": None if stage == "pending" else "2026-01-01T11:58:00Z",
        "ended_at": "2026-01-01T11:59:05Z" if stage in ("done", "failed") else None,
        "sessions": None,
        "migrated_sessions": 0,
        "failed_migrations": 0,
        "terminated_sessions": 0,
        "version_before": "v8.5.3",
        "version_after": "v8.5.4" if stage == "done" else "",
        **more,
    }


def rollout(phase: str, *steps: dict[str, Any], reason: str = "") -> dict[str, Any]:
    return {
        "id": "r-1",
        "phase": phase,
        "reason": reason,
        "created_by": "anna",
        "created_at": "2026-01-01T11:58:00Z",
        "spec": {"action": "restart", "selector": "all", "version": "v8.5.4"},
        "steps": list(steps),
    }


def test_step_row_shows_duration_and_counts() -> None:
    pending, running = (
        step("a:1", "pending"),
        step("b:1", "draining", "3 sessions are left", sessions=9, migrated_sessions=6),
    )
    assert step_row(pending, NOW)[:7] == ("a:1", "pending", "-", "-", "-", "-", "-")
    assert step_row(running, NOW)[:7] == ("b:1", "draining", "2:00", "9", "6", "0", "0")
    done = step_row(step("c:1", "done"), NOW)
    assert (done[2], done[7]) == ("1:05", "v8.5.3 -> v8.5.4")
    early = datetime(2026, 1, 1, 11, 0, 0, tzinfo=UTC)  # this machine's clock is behind
    assert step_row(running, early)[2] == "0:00"


def test_formats_a_rollout_in_one_line() -> None:
    paused = rollout("paused", step("a:1", "done"), step("b:1", "failed"), step("c:1", "pending"), reason="x")
    assert rollout_row(paused)[:6] == ("r-1", "paused", "1/3", "1", "restart", "anna")
    assert summary_line(paused) == "rollout r-1 (restart to v8.5.4, all, by anna) is paused: x"


def test_plan_lists_the_steps_for_each_node() -> None:
    spec = {
        "nodes": ["a:1", "b:1"],
        "action": "restart",
        "max_unavailable": 1,
        "drain_deadline_seconds": 600.0,
        "on_deadline": "close",
        "return_deadline_seconds": 90.0,
        "healthy_for_seconds": 10.0,
        "version": "v8.5.4",
        "failure_budget": 2,
    }
    assert plan_lines({"spec": spec}) == [
        "2 nodes, 1 at a time: a:1, b:1",
        "1. drain it, for at most 10:00; sessions that are left then are closed",
        "2. run the action restart",
        "3. wait until it is back with version v8.5.4, for at most 1:30, and has passed its checks for 0:10",
        "4. undrain it, and let it warm up",
        "pause when more than 2 nodes have failed, or at the end if fewer have",
    ]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("running", None),
        ("aborting", None),
        ("done", ""),
        ("aborted", "the rollout r-1 was aborted: b:1 is broken"),
        (
            "paused",
            "the rollout r-1 is paused: b:1 is broken; `tidevoy rollout resume r-1` continues it, `tidevoy"
            " rollout abort r-1` ends it",
        ),
    ],
)
def test_rollout_result_depends_on_the_phase(phase: str, expected: str | None) -> None:
    assert rollout_result(rollout(phase, reason="b:1 is broken")) == expected


@pytest.fixture(autouse=True)
def _poll_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.client._POLL_SECONDS", 0.0)


def test_prints_a_line_per_stage_and_a_final_report(capsys: pytest.CaptureFixture[str]) -> None:
    pending = rollout("running", step("a:1", "pending"))
    running = rollout("running", step("a:1", "draining", "9 sessions are left"))
    fewer = rollout("running", step("a:1", "draining", "8 sessions are left"))
    done = rollout("done", step("a:1", "done"))
    with FakeApiClient(ROLLOUT, running, fewer, ControlPlaneUnreachable("outage"), done) as client:
        wait_until_finished(client, pending)
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "tidevoy: rollout r-1 (restart to v8.5.4, all, by anna) is running",
        "tidevoy: a:1 draining: 9 sessions are left",
        "tidevoy: outage; retrying",
        "tidevoy: a:1 done",
        "tidevoy: rollout r-1 (restart to v8.5.4, all, by anna) is done",
    ]
    assert out.splitlines()[-1] == "rollout r-1 (restart to v8.5.4, all, by anna) is done"
    assert "v8.5.3 -> v8.5.4" in out


def test_pause_ends_the_wait_with_a_report_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    paused = rollout("paused", step("a:1", "failed", "broken\x1b[2J"), reason="a:1: broken\x1b[2J")
    with FakeApiClient(ROLLOUT) as client, pytest.raises(CliError, match="is paused: a:1: broken") as error:
        wait_until_finished(client, paused)
    assert error.value.exit_code == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err + str(error.value)
    assert "a:1" in out


def test_ctrl_c_does_not_stop_the_rollout() -> None:
    with (
        FakeApiClient(ROLLOUT, KeyboardInterrupt()) as client,
        pytest.raises(CliError, match=r"the rollout r-1 continues: `tidevoy rollout status r-1 --follow`"),
    ):
        wait_until_finished(client, rollout("running", step("a:1", "draining")))


def test_changes_are_printed_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    running = rollout("running", step("a:1", "draining"), step("b:1", "pending"))
    done = rollout("done", step("a:1", "done"), step("b:1", "done"))
    with FakeApiClient(ROLLOUT, running, done) as client:
        wait_until_finished(client, running, as_json=True)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["phase"], first["done"], first["of"]) == ("running", 0, 2)
    assert (last["phase"], last["done"], last["changed"]) == ("done", 2, done["steps"])


def test_unchanged_steps_are_not_repeated() -> None:
    running = rollout("running", step("a:1", "draining"), step("b:1", "pending"))
    assert (changes_since(None, running) or {})["changed"] == running["steps"]
    assert changes_since(running, running) is None
    assert (changes_since(running, {**running, "reason": "x"}) or {})["changed"] == []
    fewer = rollout(
        "running", step("a:1", "draining", migrated_sessions=1), step("b:1", "pending"), reason="x"
    )
    assert (changes_since(running, fewer) or {})["changed"] == [fewer["steps"][0]]

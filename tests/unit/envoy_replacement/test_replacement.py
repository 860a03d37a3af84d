"""Envoy replacement: takeover checks, parsing of Envoy states, child commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.client import ControlPlaneClient
from cli.envoy_replacement import compatibility
from cli.envoy_replacement.child_command import ChildCommand, run_command, split_command
from cli.envoy_replacement.envoy_admin import EnvoyAdmin, EnvoyState, parse_envoy_state
from cli.envoy_replacement.replacement import EnvoyReplacement
from cli.errors import EXIT_USAGE, CliError
from cli.progress_display import ProgressDisplay

OLD = EnvoyState("a", "1.40.0", True, 100.0, {"sql": "10.0.0.1:6000", "sql-olap": "10.0.0.1:6001"}, False, 7)
NEW = replace(OLD, id="b", uptime_seconds=1.0, sessions=0)
NEW_ENTRY: dict[str, Any] = {
    "id": "b",
    "connected_since": "2026-01-01T10:00:00.500000Z",
    "acked_version": "v2",
    "published_version": "v2",
    "filter": "module",
    "group": "",
    "problem": None,
    "stale_resources": [],
    "last_nack": None,
    "config_rejection": None,
}
OLD_ENTRY = {**NEW_ENTRY, "id": "a", "acked_version": "v1", "stale_resources": ["listener"]}
OLD_ADMIN, NEW_ADMIN = EnvoyAdmin("127.0.0.1:9901"), EnvoyAdmin("127.0.0.1:9902")
# A replacement whose control plane does not answer.
REPLACEMENT = EnvoyReplacement(
    ControlPlaneClient("http://127.0.0.1:1"),
    ProgressDisplay(as_json=False),
    OLD_ADMIN,
    NEW_ADMIN,
    start_command=("start",),
)


def blockers(
    new: EnvoyState | None = NEW,
    new_entry: dict[str, Any] | None = NEW_ENTRY,
    old_entry: dict[str, Any] | None = OLD_ENTRY,
    *optional_listeners: str,
) -> str:
    registered = {entry["id"]: entry for entry in (new_entry, old_entry) if entry is not None}
    return "; ".join(compatibility.takeover_blockers(OLD, new, registered, frozenset(optional_listeners)))


def test_ready_up_to_date_envoy_can_take_over() -> None:
    assert blockers() == ""
    assert blockers(old_entry=None) == ""  # the control plane restarted and does not know the old Envoy
    assert blockers(replace(NEW, listeners={**OLD.listeners, "sql-etl": "10.0.0.1:6002"})) == ""
    assert blockers(old_entry={**OLD_ENTRY, "filter": "none"}) == ""  # only the new Envoy has the module


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (blockers(None), "does not answer"),
        (blockers(replace(NEW, is_live=False)), "b is not ready"),
        (blockers(replace(NEW, listeners={})), "b has no listener"),
        (
            blockers(replace(NEW, listeners={"sql": "10.0.0.1:6000"})),
            "b lacks listeners that a has: sql-olap",
        ),
        (blockers(new_entry=None), "b is not connected"),
        (blockers(new_entry={**NEW_ENTRY, "connected_since": None}), "b is not connected"),
        (
            blockers(new_entry={**NEW_ENTRY, "acked_version": "v1"}),
            "b has not acknowledged the published version v2",
        ),
        (
            blockers(new_entry={**NEW_ENTRY, "acked_version": "", "published_version": ""}),
            "published nothing",
        ),
        (blockers(new_entry={**NEW_ENTRY, "problem": "it is old"}), "b: it is old"),
        (
            blockers(new_entry={**NEW_ENTRY, "stale_resources": ["cluster"]}),
            "b itself uses older settings: cluster",
        ),
        (blockers(new_entry={**NEW_ENTRY, "filter": "none"}), "b has the filter none, but a has module"),
        (
            blockers(new_entry={**NEW_ENTRY, "group": "olap"}),
            "b serves the group olap, but a serves all groups",
        ),
    ],
)
def test_takeover_blockers_are_reported(reported: str, expected: str) -> None:
    assert expected in reported


def test_optional_listener_may_be_missing() -> None:
    assert blockers(replace(NEW, listeners={"sql": "10.0.0.1:6000"}), NEW_ENTRY, OLD_ENTRY, "sql-olap") == ""


def test_same_id_or_closed_new_envoy_is_rejected() -> None:
    assert compatibility.permanent_problem(OLD, NEW) == ""
    assert "the id a" in compatibility.permanent_problem(OLD, replace(NEW, id="a"))
    assert "swapped" in compatibility.permanent_problem(OLD, replace(NEW, has_stopped_accepting=True))


def test_warns_if_clients_would_be_rejected() -> None:
    elsewhere = replace(NEW, listeners={"sql": "10.0.0.2:6000"})
    assert compatibility.warnings(OLD, NEW, kernel_migrates=False)
    assert compatibility.warnings(OLD, None, kernel_migrates=False)
    assert not compatibility.warnings(OLD, NEW, kernel_migrates=True)
    assert not compatibility.warnings(OLD, NEW, kernel_migrates=None)
    (warning,) = compatibility.warnings(OLD, elsewhere, kernel_migrates=False)
    assert warning.startswith(
        "no Envoy accepts connections at 10.0.0.1:6000, 10.0.0.1:6001 after a has closed its port"
    )
    assert not compatibility.warnings(
        replace(OLD, has_stopped_accepting=True), elsewhere, kernel_migrates=False
    )
    assert not compatibility.warnings(replace(OLD, has_stopped_accepting=True), NEW, kernel_migrates=False)


def test_describes_the_remaining_steps() -> None:
    assert len(list(REPLACEMENT.describe_steps(OLD, None))) == 7
    steps = list(
        replace(REPLACEMENT, on_deadline="close").describe_steps(
            replace(OLD, has_stopped_accepting=True), NEW
        )
    )
    assert [step.split()[0] for step in steps] == ["wait", "end", "stop", "remove"]


@given(st.booleans(), st.booleans(), st.floats(0, 1e6), st.floats(0, 1e6))
def test_detects_a_restarted_process(was_closed: bool, is_closed: bool, before: float, after: float) -> None:
    previous, current = (
        replace(OLD, has_stopped_accepting=was_closed, uptime_seconds=before),
        replace(OLD, has_stopped_accepting=is_closed, uptime_seconds=after),
    )
    is_same = after >= before and not (was_closed and not is_closed)
    assert compatibility.may_be_same_process(previous, current) is is_same
    assert not compatibility.may_be_same_process(previous, replace(current, id="b"))


def admin_responses(**counts: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    info = {
        "node": {"id": "a"},
        "version": "9e55/1.40.0/Clean/RELEASE/BoringSSL",
        "state": "LIVE",
        "uptime_current_epoch": "70s",
    }
    address = {"socket_address": {"address": "fd00::1", "port_value": 6000}}
    pipe = {"pipe": {"path": "/run/x"}}
    listeners = {
        "listener_statuses": [
            {"name": "sql", "local_address": address},
            {"name": "health", "local_address": address},
            {"name": "x", "local_address": pipe},
        ]
    }
    stats: list[dict[str, Any]] = [
        {"name": name.replace("__", "."), "value": value} for name, value in counts.items()
    ]
    return info, listeners, {"stats": [*stats, {"histograms": {}}]}


def test_parses_admin_port_responses() -> None:
    responses = admin_responses(
        listener__sql__downstream_cx_active=5,
        listener__sql__worker_0__downstream_cx_active=5,
        listener__sql__downstream_pre_cx_active=2,
        listener__sql__downstream_cx_total=900,
        listener__admin__downstream_cx_active=1,
        listener__health__downstream_cx_active=1,
        listener__admin__main_thread__downstream_cx_active=1,
        tcp__sql__upstream_flush_active=3,
        listener_manager__listener_stopped=0,
    )
    assert parse_envoy_state(*responses) == EnvoyState(
        "a", "1.40.0", True, 70.0, {"sql": "[fd00::1]:6000"}, False, 10
    )
    assert parse_envoy_state(*admin_responses(listener_manager__listener_stopped=2)).has_stopped_accepting


@pytest.mark.parametrize(
    "responses", [({}, {}, {}), ({"node": []}, {}, {"stats": []}), ([], {}, {"stats": []})]
)
def test_rejects_responses_of_other_servers(responses: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        parse_envoy_state(*responses)


def test_rejections_by_an_earlier_envoy_are_ignored() -> None:
    def rejected(at: str) -> dict[str, Any]:
        nack = {"at": at, "type_url": "T", "message": "no"}
        rejection = {"at": at, "extension": "socket", "text": "nor"}
        return {**NEW_ENTRY, "last_nack": nack, "config_rejection": rejection}

    assert blockers(new_entry=rejected("2026-01-01T10:00:00Z")) == ""
    assert blockers(new_entry=rejected("2026-01-01T10:00:01Z")) == (
        "b: it rejected T: no; b: its module rejected the configuration of `socket`: nor"
    )


def test_splits_a_command_without_a_shell() -> None:
    assert split_command("--start", "systemctl start 'a b'") == ("systemctl", "start", "a b")
    assert split_command("--start", "") == ()
    for wrong in ("echo 'open", "  "):
        with pytest.raises(CliError) as error:
            split_command("--start", wrong)
        assert error.value.exit_code == EXIT_USAGE


def test_failed_command_reports_the_reason(tmp_path: Path) -> None:
    run_command((sys.executable, "-c", "pass"), 30)
    with pytest.raises(CliError, match=r"returned 3: one \| two$"):
        run_command((sys.executable, "-c", "print('one\\n\\ntwo'); raise SystemExit(3)"), 30)
    with pytest.raises(CliError, match="cannot be run: No such file"):
        run_command((str(tmp_path / "none"),), 30)
    with pytest.raises(CliError, match=r"did not return within 0\.1 s"):
        run_command((sys.executable, "-c", "import time; time.sleep(60)"), 0.1)


def test_terminates_a_running_command() -> None:
    command = ChildCommand((sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"))
    assert command.exit_failure() is None
    assert command.is_running
    command.terminate()
    assert not command.is_running
    assert command.detach() == ""
    assert not command.log_path.exists()


def test_rejects_invalid_admin_ports() -> None:
    for invalid in ("9901", ":x"):
        with pytest.raises(CliError) as error:
            EnvoyAdmin(invalid)
        assert error.value.exit_code == EXIT_USAGE
    with pytest.raises(CliError, match="name the same port") as error:
        replace(REPLACEMENT, new_admin=OLD_ADMIN)
    assert error.value.exit_code == EXIT_USAGE


def test_keeps_sessions_if_the_new_envoy_is_unresponsive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new Envoy accepts connections to its admin port, but does not answer."""
    closed, quit_addresses = replace(OLD, has_stopped_accepting=True), list[str]()

    def fetch_state(admin: EnvoyAdmin) -> EnvoyState:
        if admin == OLD_ADMIN:
            return closed
        raise CliError("it does not answer")

    monkeypatch.setattr("cli.envoy_replacement.replacement._UNRESPONSIVE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", fetch_state)
    monkeypatch.setattr(EnvoyAdmin, "quit", lambda admin: quit_addresses.append(admin.address))
    with pytest.raises(CliError, match="they are not closed, because the new Envoy"):
        replace(REPLACEMENT, deadline=0.0, on_deadline="close")._wait_until_empty(closed)
    assert quit_addresses == []


def test_one_failed_poll_does_not_count_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = replace(OLD, has_stopped_accepting=True)
    states = iter([None, closed, None, None, replace(closed, sessions=0), closed, None, None, None])
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", lambda admin: next(states) if admin == OLD_ADMIN else NEW)
    monkeypatch.setattr("cli.envoy_replacement.replacement._POLL_SECONDS", 0.0)
    assert REPLACEMENT._wait_until_empty(closed)
    with pytest.raises(CliError, match="has stopped on its own; it had 7 sessions"):
        REPLACEMENT._wait_until_empty(closed)


@pytest.mark.parametrize("restarted", [OLD, replace(OLD, has_stopped_accepting=True, uptime_seconds=1.0)])
def test_restart_of_the_old_envoy_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, restarted: EnvoyState
) -> None:
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", lambda admin: restarted)
    with pytest.raises(CliError, match="was restarted meanwhile"):
        REPLACEMENT._wait_until_empty(replace(OLD, has_stopped_accepting=True))


class RecordedCommand:
    """Replaces the command that started the new Envoy."""

    is_running = True

    def __init__(self) -> None:
        self.is_terminated = False

    def exit_failure(self) -> None:
        return None

    def terminate(self) -> None:
        self.is_terminated = True

    def detach(self) -> str:
        return ""


def roll_back(monkeypatch: pytest.MonkeyPatch, answers: Sequence[EnvoyState | CliError | None]) -> str | None:
    """Roll back a new Envoy whose admin port gives these answers; the last one repeats.

    Return why it is left running, or None if it was stopped.
    """
    remaining, command = list(answers), RecordedCommand()

    def fetch_state(admin: EnvoyAdmin) -> EnvoyState | None:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(answer, CliError):
            raise answer
        return answer

    monkeypatch.setattr("cli.envoy_replacement.replacement._ROLLBACK_WAIT_SECONDS", 0.2)
    monkeypatch.setattr("cli.envoy_replacement.replacement._POLL_SECONDS", 0.0)
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", fetch_state)
    monkeypatch.setattr(EnvoyAdmin, "drain_listeners", lambda admin: None)
    monkeypatch.setattr(EnvoyAdmin, "quit", lambda admin: None)
    status = REPLACEMENT._roll_back_new(cast(ChildCommand, command))
    return None if command.is_terminated else status


FAILED, BUSY = CliError("it does not answer"), replace(NEW, sessions=3)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([FAILED], "it is unknown whether the new Envoy at 127.0.0.1:9902 has sessions"),
        ([NEW, FAILED], "it is unknown whether the new Envoy at 127.0.0.1:9902 has sessions"),
        ([BUSY], "has 3, so it is left running"),
        ([FAILED, BUSY], "has 3, so it is left running"),
    ],
)
def test_rollback_keeps_an_envoy_that_may_have_sessions(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[EnvoyState | CliError], reason: str
) -> None:
    assert reason in (roll_back(monkeypatch, answers) or "")


@pytest.mark.parametrize("answers", [[None], [BUSY, NEW, None], [FAILED, NEW, NEW, None], [FAILED, None]])
def test_rollback_stops_an_envoy_without_sessions(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[EnvoyState | CliError | None]
) -> None:
    assert roll_back(monkeypatch, answers) is None


def test_rollback_repeats_a_failed_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [CliError("no answer")]

    def drain_listeners(admin: EnvoyAdmin) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr("cli.envoy_replacement.replacement._POLL_SECONDS", 0.0)
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", lambda admin: NEW)
    monkeypatch.setattr(EnvoyAdmin, "drain_listeners", drain_listeners)
    assert REPLACEMENT._drain_new() == 0
    assert failures == []

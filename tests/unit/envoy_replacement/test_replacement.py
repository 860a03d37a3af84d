"""When one Envoy may take over from another, what is read of both, and what a command of a recycle does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.envoy_replacement import compatibility
from cli.envoy_replacement.child_command import ChildCommand, run_command, split_command
from cli.envoy_replacement.envoy_admin import EnvoyAdmin
from cli.envoy_replacement.model import EnvoyState, ProgressMessage, RegisteredEnvoy, ReplacementSpec
from cli.envoy_replacement.replacement import EnvoyReplacement
from cli.errors import EXIT_USAGE, CliError

OLD = EnvoyState("a", "1.40.0", True, 100.0, {"sql": "10.0.0.1:6000", "sql-olap": "10.0.0.1:6001"}, False, 7)
NEW = replace(OLD, id="b", uptime_seconds=1.0, sessions=0)
WAS = RegisteredEnvoy("a", True, "v1", "v2", "module", stale_resources=("listener",))
IS = RegisteredEnvoy("b", True, "v2", "v2", "module")
ORDER = ReplacementSpec("127.0.0.1:9901", "127.0.0.1:9902", start_command=("start",))


def why(
    new: EnvoyState | None = NEW,
    member: RegisteredEnvoy | None = IS,
    was: RegisteredEnvoy | None = WAS,
    *without: str,
) -> str:
    members = {each.id: each for each in (member, was) if each is not None}
    return "; ".join(compatibility.takeover_blockers(OLD, new, members, frozenset(without)))


def test_one_that_is_ready_and_runs_what_is_published_takes_over() -> None:
    assert why() == ""
    assert why(was=None) == ""  # the control plane has been started since, and has not seen the old one
    assert why(replace(NEW, listeners={**OLD.listeners, "sql-etl": "10.0.0.1:6002"})) == ""
    assert why(was=replace(WAS, filter="none")) == ""  # it gains the module


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (why(None), "does not answer"),
        (why(replace(NEW, is_live=False)), "b is not ready"),
        (why(replace(NEW, listeners={})), "b has no listener"),
        (why(replace(NEW, listeners={"sql": "10.0.0.1:6000"})), "b lacks what a has: sql-olap"),
        (why(member=None), "b is not connected"),
        (why(member=replace(IS, is_connected=False)), "b is not connected"),
        (why(member=replace(IS, acked_version="v1")), "b has not acknowledged v2"),
        (why(member=replace(IS, acked_version="", published_version="")), "published nothing"),
        (why(member=replace(IS, problems=("it refused it",))), "b: it refused it"),
        (why(member=replace(IS, stale_resources=("cluster",))), "b runs older settings itself: cluster"),
        (why(member=replace(IS, filter="none")), "b has the filter none, and a has module"),
        (why(member=replace(IS, group="olap")), "b serves the group olap, and a serves all groups"),
    ],
)
def test_whatever_speaks_against_it_is_said(said: str, text: str) -> None:
    assert text in said


def test_a_listener_that_nobody_needs_may_be_missing() -> None:
    assert why(replace(NEW, listeners={"sql": "10.0.0.1:6000"}), IS, WAS, "sql-olap") == ""


def test_two_of_one_id_and_a_closed_one_are_mistakes() -> None:
    assert compatibility.permanent_problems(OLD, NEW) == ()
    assert "the id a" in compatibility.permanent_problems(OLD, replace(NEW, id="a"))[0]
    assert "swapped" in compatibility.permanent_problems(OLD, replace(NEW, has_stopped_accepting=True))[0]


def test_a_caution_where_clients_would_be_turned_away() -> None:
    elsewhere = replace(NEW, listeners={"sql": "10.0.0.2:6000"})
    assert compatibility.warnings(OLD, NEW, kernel_migrates=False)
    assert compatibility.warnings(OLD, None, kernel_migrates=False)
    assert not compatibility.warnings(OLD, NEW, kernel_migrates=True)
    assert not compatibility.warnings(OLD, NEW, kernel_migrates=None)
    (told,) = compatibility.warnings(OLD, elsewhere, kernel_migrates=False)
    assert told.startswith("nobody accepts at 10.0.0.1:6000, 10.0.0.1:6001 when a has closed its port")
    assert not compatibility.warnings(
        replace(OLD, has_stopped_accepting=True), elsewhere, kernel_migrates=False
    )
    assert not compatibility.warnings(replace(OLD, has_stopped_accepting=True), NEW, kernel_migrates=False)


def test_the_steps_that_are_left() -> None:
    assert len(list(compatibility.describe_steps(ORDER, OLD, None))) == 7
    waiting = list(
        compatibility.describe_steps(
            replace(ORDER, on_deadline="cut"), replace(OLD, has_stopped_accepting=True), NEW
        )
    )
    assert [step.split()[0] for step in waiting] == ["wait", "cut", "end", "tell"]


@given(st.booleans(), st.booleans(), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_process_neither_grows_younger_nor_opens_again(
    was: bool, is_now: bool, before: float, after: float
) -> None:
    then, now = (
        replace(OLD, has_stopped_accepting=was, uptime_seconds=before),
        replace(OLD, has_stopped_accepting=is_now, uptime_seconds=after),
    )
    assert compatibility.is_same_process(then, now) is (after >= before and not (was and not is_now))
    assert not compatibility.is_same_process(then, replace(now, id="b"))


def answers(**counts: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    info = {
        "node": {"id": "a"},
        "version": "9e55/1.40.0/Clean/RELEASE/BoringSSL",
        "state": "LIVE",
        "uptime_current_epoch": "70s",
    }
    address = {"socket_address": {"address": "fd00::1", "port_value": 6000}}
    pipe = {"pipe": {"path": "/run/x"}}
    listeners = {
        "listener_statuses": [{"name": "sql", "local_address": address}, {"name": "x", "local_address": pipe}]
    }
    stats: list[dict[str, Any]] = [
        {"name": name.replace("__", "."), "value": value} for name, value in counts.items()
    ]
    return info, listeners, {"stats": [*stats, {"histograms": {}}]}


def test_what_admin_ports_tell() -> None:
    told = answers(
        listener__sql__downstream_cx_active=5,
        listener__sql__worker_0__downstream_cx_active=5,
        listener__sql__downstream_pre_cx_active=2,
        listener__sql__downstream_cx_total=900,
        listener__admin__downstream_cx_active=1,
        listener__admin__main_thread__downstream_cx_active=1,
        tcp__sql__upstream_flush_active=3,
        listener_manager__listener_stopped=0,
    )
    assert compatibility.parse_envoy_state(*told) == EnvoyState(
        "a", "1.40.0", True, 70.0, {"sql": "[fd00::1]:6000"}, False, 10
    )
    assert compatibility.parse_envoy_state(
        *answers(listener_manager__listener_stopped=2)
    ).has_stopped_accepting


@pytest.mark.parametrize("told", [({}, {}, {}), ({"node": []}, {}, {"stats": []}), ([], {}, {"stats": []})])
def test_what_is_no_envoy_is_not_taken_for_one(told: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        compatibility.parse_envoy_state(*told)


def test_what_an_earlier_envoy_of_that_id_refused_is_passed_over() -> None:
    refused = {
        "at": "2026-01-01T10:00:00Z",
        "type_url": "T",
        "message": "no",
        "extension": "socket",
        "text": "nor",
    }
    envoy: dict[str, Any] = {
        "id": "b",
        "acked_version": "v",
        "published_version": "v",
        "filter": "module",
        "group": "",
        "problem": None,
        "outdated": [],
        "last_nack": refused,
        "refusal": refused,
    }
    assert (
        compatibility.parse_registered_envoy(
            {**envoy, "connected_since": "2026-01-01T10:00:00.500000Z"}
        ).problems
        == ()
    )
    assert compatibility.parse_registered_envoy({**envoy, "connected_since": None}).problems == ()
    assert compatibility.parse_registered_envoy(
        {**envoy, "connected_since": "2026-01-01T09:59:59.500000Z"}
    ).problems == (
        "it refused T: no",
        "its module refused its socket: nor",
    )


def test_a_command_is_words_and_no_shell() -> None:
    assert split_command("--start", "systemctl start 'a b'") == ("systemctl", "start", "a b")
    assert split_command("--start", "") == ()
    for wrong in ("echo 'open", "  "):
        with pytest.raises(CliError) as refused:
            split_command("--start", wrong)
        assert refused.value.exit_code == EXIT_USAGE


def test_a_command_tells_why_it_failed(tmp_path: Path) -> None:
    run_command((sys.executable, "-c", "pass"), 30)
    with pytest.raises(CliError, match=r"returned 3: one \| two$"):
        run_command((sys.executable, "-c", "print('one\\n\\ntwo'); raise SystemExit(3)"), 30)
    with pytest.raises(CliError, match="cannot be run: No such file"):
        run_command((str(tmp_path / "none"),), 30)
    with pytest.raises(CliError, match=r"did not return within 0\.1 s"):
        run_command((sys.executable, "-c", "import time; time.sleep(60)"), 0.1)


def test_a_command_that_stays_is_left_running_or_ended() -> None:
    stays = ChildCommand((sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"))
    assert stays.exit_failure() is None
    assert stays.is_running
    stays.terminate()
    assert not stays.is_running
    assert stays.detach() is None
    assert not stays.log_path.exists()


class Nobody:
    """A control plane that must not be asked."""

    def envoys(self) -> dict[str, RegisteredEnvoy]:
        raise AssertionError

    def forget(self, envoy: str) -> None:
        raise AssertionError(envoy)


def test_orders_that_make_no_sense_are_refused() -> None:
    told: list[ProgressMessage] = []
    for old, new in (
        ("127.0.0.1:9901", "127.0.0.1:9901"),
        ("9901", "127.0.0.1:9902"),
        ("127.0.0.1:9901", ":x"),
    ):
        with pytest.raises(CliError) as refused:
            EnvoyReplacement(ReplacementSpec(old, new), Nobody(), told.append)
        assert refused.value.exit_code == EXIT_USAGE
    assert told == []


def test_nothing_is_cut_while_nobody_knows_whether_the_new_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new one takes connections to its admin port, and does not answer."""
    closed, ended = replace(OLD, has_stopped_accepting=True), list[str]()

    def look(admin: EnvoyAdmin) -> EnvoyState:
        if admin.address == ORDER.old_admin:
            return closed
        raise CliError("it does not answer")

    monkeypatch.setattr("cli.envoy_replacement.replacement._UNRESPONSIVE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(EnvoyAdmin, "fetch_state", look)
    monkeypatch.setattr(EnvoyAdmin, "quit", lambda admin: ended.append(admin.address))
    job = EnvoyReplacement(replace(ORDER, deadline=0.0, on_deadline="cut"), Nobody(), lambda told: None)
    with pytest.raises(CliError, match="they are not cut, because the new Envoy"):
        job._wait_until_empty(closed)
    assert ended == []


def test_one_look_that_is_turned_away_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = replace(OLD, has_stopped_accepting=True)
    looks = iter([None, closed, None, None, replace(closed, sessions=0), closed, None, None, None])
    monkeypatch.setattr(
        EnvoyAdmin, "fetch_state", lambda admin: next(looks) if admin.address == ORDER.old_admin else NEW
    )
    monkeypatch.setattr("cli.envoy_replacement.replacement._POLL_SECONDS", 0.0)
    job = EnvoyReplacement(ORDER, Nobody(), lambda told: None)
    assert job._wait_until_empty(closed)
    with pytest.raises(CliError, match="has ended by itself, with 7 sessions"):
        job._wait_until_empty(closed)

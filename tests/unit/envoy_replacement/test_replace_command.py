"""`tidevoy envoys replace`, with a simulated control plane and simulated admin ports."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from cli.envoy_replacement.envoy_admin import EnvoyAdmin
from cli.errors import CliError
from cli.main import run
from tests.support.controlplane.cli_process import fake_http

ENTRY: dict[str, Any] = {
    "id": "b",
    "connected_since": "2026-01-01T10:00:00Z",
    "filter": "module",
    "group": "",
}
ENTRY |= {"acked_version": "v2", "published_version": "v2", "problem": None, "last_nack": None}
ENTRY |= {"stale_resources": [], "config_rejection": None}
INFO = {"version": "9e55/1.40.0/x", "uptime_current_epoch": "7s"}
ADDRESS = {"socket_address": {"address": "10.0.0.1", "port_value": 6000}}


class FakeMachine:
    """Answers requests to the control plane, and to the admin ports of the old Envoy `a` and the new `b`."""

    def __init__(self, state: str, sessions: Sequence[int]) -> None:
        """`sessions` are those of `a` after it has stopped accepting; the last number repeats.

        `state` begins with the running Envoys. Without `b`, the command to start it takes a while. If `b` is
        a twin, its id is also `a`.
        """
        self.changes = list[str]()
        self._sessions, self._is_live, self._polls = list(sessions), "unready" not in state, 0
        self._is_twin, self._stopping = "twin" in state, set[str]()
        self._running, self._closed = set(state.split()[0]), {"a"} if "closed" in state else set[str]()

    def answer(self, request: httpx2.Request) -> Any:
        path, envoy = request.url.path, {9901: "a", 9902: "b"}.get(request.url.port or 0, "")
        if request.method != "GET":
            self.changes.append(f"{envoy} {path}".strip())
        if not envoy:
            self._polls += 1
            if self._polls == 2 and "b" not in self._running:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until the command has ended
                self._running.add("b")
            return {"envoys": [ENTRY]}
        if envoy not in self._running:
            return httpx2.ConnectError("refused")
        if path == "/quitquitquit":
            self._stopping.add(envoy)
        if path == "/drain_listeners":
            self._closed.add(envoy)
        if path == "/server_info":
            state = "INITIALIZING" if envoy == "b" and not self._is_live else "LIVE"
            return INFO | {"node": {"id": "a" if self._is_twin else envoy}, "state": state}
        if path == "/listeners":
            return {"listener_statuses": [{"name": "sql", "local_address": ADDRESS}]}
        stats = {"listener_manager.listener_stopped": int(envoy in self._closed)}
        if envoy == "a":
            stats["listener.sql.downstream_cx_active"] = self._sessions[0]
        if path == "/stats" and envoy in self._closed and self._sessions[1:]:
            self._sessions.pop(0)
        if path == "/stats":
            self._running -= self._stopping
        return {"stats": [{"name": name, "value": value} for name, value in stats.items()]}


CLOSE, STOP = ["a /drain_listeners"], ["a /quitquitquit", "/v1/envoys/a"]
DRAIN = ["a /runtime_modify"]
UNDO = ["b /drain_listeners", "b /quitquitquit"]


@pytest.mark.parametrize(
    ("options", "state", "sessions", "exit_code", "message", "changes"),
    [
        ("", "ab", [5, 2, 0], 0, "the old Envoy has stopped", CLOSE + STOP),
        ("", "ab closed", [3, 3, 0], 0, "a already accepts no new sessions", STOP),
        ("", "a closed", [3, 3, 0], 0, "no Envoy accepts new sessions: the new Envoy", STOP),
        ("--deadline 0", "ab", [5], 1, "still has sessions (5); they stay open", CLOSE),
        ("--deadline 0 --on-deadline close", "ab", [5], 0, "(5), which end now", CLOSE + DRAIN + STOP),
        ("--dry-run", "ab", [0], 0, "would remove a from the control plane", []),
        ("--dry-run", "ab unready", [0], 1, "would be rejected now: b is not ready", []),
        ("--start-timeout 0", "ab unready", [0], 1, "b is not ready; a keeps serving", []),
        ("--start true", "a", [0], 0, "b is ready at 10.0.0.1:6000", CLOSE + STOP),
        ("--start false", "a unready", [0], 1, "a keeps serving", UNDO),
        ("--start true", "a twin", [0], 1, "belong to an Envoy with the id a", UNDO),
        ("--stop false", "ab", [0], 1, "`false` returned 1", CLOSE),
        ("", "a", [0], 1, "start the new Envoy first, or set --start", []),
        ("", "b", [0], 0, "nothing to do: no Envoy runs at 127.0.0.1:9901", []),
        ("", "none", [0], 1, "no Envoy answers at 127.0.0.1:9901 or 127.0.0.1:9902", []),
    ],
)
def test_replaces_an_envoy_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    state: str,
    sessions: Sequence[int],
    exit_code: int,
    message: str,
    changes: list[str],
) -> None:
    machine = FakeMachine(state, sessions)
    fake_http(monkeypatch, machine.answer)
    assert run(["envoys", "replace", *options.split()]) == exit_code
    output = capsys.readouterr()
    assert message in output.out + output.err
    assert machine.changes == changes


def test_prints_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_http(monkeypatch, FakeMachine("ab", [3, 1, 0]).answer)
    assert run(["envoys", "replace", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = dict.fromkeys(line["step"] for line in lines)
    assert list(steps) == ["check", "ready", "close", "watch", "end", "done"]
    assert [line["sessions"] for line in lines if line["step"] in ("close", "watch")] == [3, 1, 0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (httpx2.ConnectError("refused"), None),
        (httpx2.ReadError("closed"), None),
        (httpx2.ReadTimeout("late"), "does not answer within 5 s"),
        (httpx2.Response(404), "127.0.0.1:9901 is not the admin port of an Envoy"),
        (httpx2.Response(200, text="<html>"), "127.0.0.1:9901 is not the admin port of an Envoy"),
    ],
)
def test_admin_port_without_an_envoy(
    monkeypatch: pytest.MonkeyPatch, answer: httpx2.Response | Exception, problem: str | None
) -> None:
    fake_http(monkeypatch, lambda request: answer)
    admin = EnvoyAdmin("127.0.0.1:9901")
    if problem is None:
        assert admin.fetch_state() is None
        with pytest.raises(CliError, match=r"the Envoy at 127\.0\.0\.1:9901 did not stop: "):
            admin.quit()
    else:
        with pytest.raises(CliError, match=problem):
            admin.fetch_state()

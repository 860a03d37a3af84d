"""The commands `sessions` and `kill`."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import yaml

from cli.main import run
from tests.support.controlplane.cli_process import fake_http

ANSWER: dict[str, Any] = yaml.safe_load("""
total: 3
incomplete: ["these Envoys have not answered: edge-2"]
sessions:
  - {id: 5, node_id: 77, envoy: edge-1, client: '10.0.0.1:4', user: app, database: shop, node: 'a:1',
     state: busy, seconds: 75.5, since: '2026-11-22T10:00:05Z', moves: 2, digest: ab12cd34ef56ab12,
     text: "select ?\\nfrom t"}
  - {id: null, node_id: null, envoy: edge-1, client: '10.0.0.1:5', user: null, database: null, node: null,
     state: login, seconds: 0.25, since: null, moves: 0, digest: null, text: null}
""")


def test_sessions_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requests = fake_http(monkeypatch, lambda _: ANSWER)
    assert run(["sessions", "--user", "app", "--client", "10.0.0.1", "--limit", "2"]) == 0
    assert requests[0].url.query.decode() == "user=app&client=10.0.0.1&limit=2"
    output = capsys.readouterr()
    lines = [" ".join(line.split()) for line in output.out.splitlines()]
    assert lines[0] == "ID NODE ID USER CLIENT ENVOY NODE DATABASE STATE TIME MOVES SINCE STATEMENT"
    assert lines[1].startswith("5 77 app 10.0.0.1:4 edge-1 a:1 shop busy 75.5s 2 2026-11-2")
    assert lines[1].endswith("ab12cd34ef56 select ? from t")
    assert lines[2] == "- - - 10.0.0.1:5 edge-1 - - login 250ms 0 - -"
    assert "2 of 3 sessions are shown" in output.err
    assert "sessions may be missing: these Envoys have not answered: edge-2" in output.err


def test_sessions_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_http(monkeypatch, lambda _: ANSWER)
    assert run(["sessions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_session_is_killed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requests = fake_http(monkeypatch, lambda _: ANSWER["sessions"][0])
    assert run(["kill", "5", "--envoy", "edge-1"]) == 0
    assert (requests[0].method, requests[0].url.path) == ("DELETE", "/v1/sessions/5")
    assert requests[0].url.query == b"envoy=edge-1"
    assert capsys.readouterr().out == "ended session 5 of app from 10.0.0.1:4 through edge-1 on a:1\n"


def test_refused_kill_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"title": "The id means several sessions", "detail": "the id 5 means 2 sessions", "status": 409}
    fake_http(monkeypatch, lambda _: httpx2.Response(409, json=problem))
    assert run(["kill", "5"]) == 1
    assert "the id 5 means 2 sessions" in capsys.readouterr().err
    assert run(["kill", "x"]) == 2

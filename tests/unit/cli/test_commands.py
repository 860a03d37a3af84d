"""Commands: the requests that they send, and what they print of the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from api.auth.credentials import sha256
from cli.main import main, run
from tests.support.controlplane.cli_process import fake_http

TIME = r"2026-11-2\d \d\d:\d\d:05"  # the time in the answers, in any time zone
ANSWERS: dict[str, Any] = yaml.safe_load("""
/v1/nodes: &nodes
  nodes:
    - &node
      {address: 'a:1', state: drained, sessions: 0, connections: null, weight: 100, source: manual,
       version: '', since: &at '2026-11-22T10:00:05.5Z', reason: healthy, zone: null, endpoint: 'h:1',
       migration_blockers: [TLS is off], ejected_by: [], rebalance: 2, drain: null, eds_health: null,
       health: {status: null, sql: null, statement: {status: misconfigured, reason: no such user}},
       metrics: {memory: 0.456, cpu: null},
       explanation: {share: 0.25, weight: 50, sentence: memory is high, factors: [
         {name: connections, score: 12.4, share: null}, {name: health, score: 1, share: 0.5},
         {name: memory, score: 2, share: 1}, {name: cpu, score: null, share: null}]}}
  problems: [{source: pd, subject: x, reason: no port}]
  other_keyspace: [{address: 'b:1', keyspace: k}]
  excluded: ['c:1']
/v1/nodes?explain=true: *nodes
/v1/nodes/a%3A1: *node
/v1/envoys: {envoys: [
  {id: e/1, address: 10.0.0.1, version: 1.40.0, filter: module, sessions: 3, connected_since: null,
   last_seen: *at, streams: 2, problem: it is old, stale_resources: [listener], stale_settings: [x, y],
   last_nack: {type_url: T, at: *at, message: wrong},
   config_rejection: {extension: socket, at: *at, text: bad},
   offload: "off", migration: "off", overrides: {offload: "off", migration: null}, runtime_off: [],
  }]}
/v1/replicas: {replicas: [
  {name: r1, address: 'h:1', version: '1', since: *at, is_self: true, is_leader: true, leader_since: *at,
   unreachable: itself},
  {name: r2, address: 'h:2', version: '1', since: *at, is_self: false, is_leader: false,
   unreachable: is down}]}
/v1/limits: {limits: [
  {name: reporting, user: report, network: null, max_connections: 100, max_new_connections_per_second: 0.0,
   connections: 63, refused: 7, envoys: [
     {envoy: e1, connections: 60, quota: 80, refused: 7},
     {envoy: e2, connections: 3, quota: 20, refused: 0}]},
  {name: office, user: null, network: 10.0.0.0/8, max_connections: 0, max_new_connections_per_second: 2.5,
   connections: 1, refused: 0, envoys: [{envoy: e1, connections: 1, quota: null, refused: 0}]}]}
/v1/rules: {rules: [
  {name: no-sleep, source: api, action: block, enabled: true, dry_run: false, hits: 7, dry_run_hits: 0,
   rule: {name: no-sleep, pattern: 'sleep', user: [a, b], block: {}}},
  {name: all, source: settings, action: log, enabled: true, dry_run: true, hits: 0, dry_run_hits: 9,
   rule: {name: all, log: true, dry_run: true}},
  {name: old, source: settings, action: log, enabled: false, dry_run: false, hits: 0, dry_run_hits: 0,
   rule: {name: old, log: true, enabled: false}}]}
/v1/traffic/capture:
  state: running
  capture: {name: c1, started_at: *at, until: *at, envoys: [], users: [a, b], groups: []}
  ended_at: null
  directory: /captures/c1
  envoys:
    - {envoy: e1, active: true, records: 7, dropped: 2, filtered: 1, bytes: 900, write_errors: 0,
       problem: null}
    - {envoy: e2, active: false, records: 7, dropped: 0, filtered: 0, bytes: 9, write_errors: 1,
       problem: null}
    - {envoy: e3, active: false, records: null, dropped: null, filtered: null, bytes: null,
       write_errors: null, problem: it has no module}
/v1/rollouts: {rollouts: [&rollout
  {id: r/1, phase: done, reason: '', created_by: anna, created_at: *at, steps: [],
   spec: {action: manual, selector: all, version: ''}}]}
/v1/rollouts/r%2F1: *rollout
/v1/config: {log: {level: info}}
plan:
  spec: {nodes: ['a:1'], action: manual, version: '', max_unavailable: 1, failure_budget: 0,
         on_deadline: keep, drain_deadline_seconds: 60.0, return_deadline_seconds: 60.0,
         healthy_for_seconds: 10.0}
  warnings: [one node]
  problems: []
""")
NODE, ROLLOUT, PLAN = ANSWERS["/v1/nodes/a%3A1"], ANSWERS["/v1/rollouts/r%2F1"], ANSWERS["plan"]
ROLLOUT_LINE = "rollout r/1 (manual, all, by anna) is done"
ADDED = {"address": "a:1", "status_address": None, "weight": None, "labels": None}
LABELLED = ADDED | {"status_address": "a:2", "weight": 5, "labels": {"zone": "x"}}
KEEP, CLOSE = {"on_deadline": "keep"}, {"on_deadline": "close", "deadline_seconds": 60.0}


@pytest.mark.parametrize(
    ("command", "request_line", "body", "output"),
    [
        ("add a:1", "POST /v1/nodes", ADDED, "a:1 added: drained, sessions: 0 (healthy)"),
        ("add a:1 --status-address a:2 --weight 5 --label zone=x", "POST /v1/nodes", LABELLED, "a:1 added"),
        ("remove a:1", "DELETE /v1/nodes/a%3A1", None, "a:1 removed"),
        ("remove a:1 --force", "DELETE /v1/nodes/a%3A1?force=true", None, "a:1 removed"),
        ("drain a:1", "POST /v1/nodes/a%3A1/drain", KEEP, "a:1 is being drained"),
        ("drain a:1 --wait", "POST /v1/nodes/a%3A1/drain", KEEP, "a:1 is drained after"),
        ("drain a:1 --deadline 1m --on-deadline close --json", "POST /v1/nodes/a%3A1/drain", CLOSE, '"a:1",'),
        ("undrain a:1", "POST /v1/nodes/a%3A1/undrain", None, "a:1 accepts sessions again"),
        ("weight a:1 7", "PATCH /v1/nodes/a%3A1", {"weight": 7}, "a:1 has weight 7"),
        ("envoys forget e/1", "DELETE /v1/envoys/e%2F1", None, "e/1 is removed"),
        ("rollout pause r/1", "POST /v1/rollouts/r%2F1/pause", None, ROLLOUT_LINE),
        ("rollout resume r/1", "POST /v1/rollouts/r%2F1/resume", None, ROLLOUT_LINE),
        ("rollout abort r/1", "POST /v1/rollouts/r%2F1/abort", None, ROLLOUT_LINE),
    ],
)
def test_changes_are_sent_and_confirmed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    request_line: str,
    body: dict[str, Any] | None,
    output: str,
) -> None:
    requests = fake_http(monkeypatch, lambda request: ROLLOUT if "rollout" in command else NODE)
    assert run(command.split()) == 0
    assert [f"{r.method} {r.url.raw_path.decode()}" for r in requests] == [request_line]
    assert json.loads(requests[0].content or b"null") == body
    assert output in capsys.readouterr().out


NODE_HEADERS = "ADDRESS  STATE  SESSIONS  CONNECTIONS  WEIGHT  SOURCE  VERSION  SINCE  REASON"
NODE_ROW, REBALANCE = (
    f"a:1  drained  0  -  100  manual  -  {TIME}  healthy",
    "a:1: 2 sessions are to migrate to.*",
)
NODE_NOTES = [
    "pd: x cannot be used: no port",
    "b:1 belongs to keyspace k; nothing is sent to it",
    "c:1 was removed and stays excluded; `tidevoy add c:1` adds it again",
]
EXPLANATION_HEADERS = "ADDRESS  STATE  SHARE  WEIGHT  ZONE  SESSIONS  HEALTH  MEMORY  CPU  WHY"
EXPLANATION = r"a:1  drained  25.0%  50  -  12  abnormal \(50%\)  46%  -  memory is high"
ENVOY_ROWS = [
    "ID  ADDRESS  VERSION  FILTER  SESSIONS  CONNECTED SINCE  STATE",
    f"e/1  10.0.0.1  1.40.0  module  3  -  disconnected since {TIME}",
]
ENVOY_NOTES = [
    f"e/1 rejected T at {TIME}: wrong",
    f"e/1: its module rejected the configuration of `socket` at {TIME}: bad",
    "e/1: offload is switched off by an operator; migration is switched off by the settings",
    r"e/1: 2 Envoys may be connected under this id; give each a unique one \(.*\)",
    "e/1: it is old",
    "e/1 uses older settings until that Envoy restarts: x, y; .*",
]
UNCHECKED = "a:1 is not checked: no such user"
ROLLOUT_ROWS = [
    "ID  PHASE  NODES  FAILED  ACTION  BY  CREATED  REASON",
    f"r/1  done  0/0  0  manual  anna  {TIME}",
]
STEP_HEADERS = "ADDRESS  STAGE  DURATION  SESSIONS  MIGRATED  FAILED  CLOSED  VERSION  REASON"
REPLICA_ROWS = [
    "NAME  ADDRESS  VERSION  STARTED  ROLE",
    rf"r1 \(this one\)  h:1  1  {TIME}  leader since {TIME}",
    f"r2  h:2  1  {TIME}  follower",
]

RULE_ROWS = [
    "RULE  FROM  ACTION  STATE  HITS  CONDITIONS",
    "no-sleep  api  block  on  7  pattern sleep; user a, b",
    "all  settings  log  dry run  9  all statements",
    "old  settings  log  off  0  all statements",
]
CAPTURE_ROWS = [
    f"c1 running: from {TIME} until {TIME}",
    "users  a, b",
    "groups  all",
    "directory  /captures/c1",
    "ENVOY  STATE  RECORDS  DROPPED  FILTERED  BYTES  WRITE ERRORS",
    "e1  active  7  2  1  900  0",
    "e2  ended  7  0  0  9  1",
    "e3  not reported  -  -  -  -  -",
]
CAPTURE_NOTES = ["e1: 2 records are missing in its files", "e3 does not capture: it has no module"]
LIMIT_ROWS = [
    "RULE  USER  NETWORK  CONNECTIONS  LIMIT  NEW PER SECOND  REFUSED  ENVOYS",
    "reporting  report  all  63  100  -  7  e1 60/80, e2 3/20",
    "office  all  10.0.0.0/8  1  -  2.5  0  e1 1",
]


@pytest.mark.parametrize(
    ("command", "rows", "notes"),
    [
        ("nodes", [NODE_HEADERS, NODE_ROW], [UNCHECKED, REBALANCE, *NODE_NOTES]),
        ("nodes a:1", [NODE_HEADERS, NODE_ROW], ["a:1: TLS is off", UNCHECKED, REBALANCE]),
        ("nodes --explain", [EXPLANATION_HEADERS, EXPLANATION], []),
        ("envoys", ENVOY_ROWS, ENVOY_NOTES),
        ("replicas", REPLICA_ROWS, ["r2 is down"]),
        ("limits", LIMIT_ROWS, []),
        ("rules", RULE_ROWS, []),
        ("rules list", RULE_ROWS, []),
        ("traffic capture status", CAPTURE_ROWS, CAPTURE_NOTES),
        ("rollout status", ROLLOUT_ROWS, []),
        ("rollout status r/1", [STEP_HEADERS, re.escape(ROLLOUT_LINE)], []),
        ("config show", ["log:", "  level: info"], []),
    ],
)
def test_answers_are_shown_as_tables_or_as_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    rows: list[str],
    notes: list[str],
) -> None:
    requests = fake_http(monkeypatch, lambda request: ANSWERS[request.url.raw_path.decode()])
    assert run(command.split()) == 0
    output = capsys.readouterr()
    for row, line in zip(rows, output.out.splitlines(), strict=True):
        assert re.fullmatch(row, re.sub(" {2,}", "  ", line))
    for note, line in zip(notes, output.err.splitlines(), strict=True):
        assert re.fullmatch(f"tidevoy: {note}", line)
    assert run([*command.split(), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == ANSWERS[requests[0].url.raw_path.decode()]
    assert output.err == ""


SPEC = {
    "nodes": "all",
    "action": "manual",
    "max_unavailable": 1,
    "failure_budget": 0,
    "version": "",
    "drain_deadline_seconds": 600.0,
    "return_deadline_seconds": 600.0,
    "healthy_for_seconds": 10.0,
    "on_deadline": "keep",
}


@pytest.mark.parametrize(
    ("options", "answers", "exit_code", "out", "err"),
    [
        ("--no-wait", [PLAN, ROLLOUT], 0, ROLLOUT_LINE, "one node"),
        ("--wait", [PLAN, ROLLOUT | {"phase": "running"}, ROLLOUT], 0, ROLLOUT_LINE, "is running"),
        ("--no-wait --json --force", [PLAN, ROLLOUT], 0, '"id": "r/1"', "one node"),
        ("--dry-run", [PLAN], 0, "2. run the action manual", "one node"),
        ("--dry-run", [PLAN | {"problems": ["no TLS"]}], 1, "1 node, ", "would be rejected: no TLS"),
        ("--dry-run --json", [PLAN], 0, '"warnings": [\n    "one node"\n  ]', ""),
    ],
)
def test_starts_a_rollout_after_its_checks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    answers: list[Any],
    exit_code: int,
    out: str,
    err: str,
) -> None:
    remaining = iter(answers)
    requests = fake_http(monkeypatch, lambda request: next(remaining))
    assert run(["rollout", "start", "--nodes", "all", *options.split()]) == exit_code
    assert json.loads(requests[0].content) == {**SPEC, "dry_run": True}
    if len(requests) > 1:
        assert json.loads(requests[1].content) == {**SPEC, "force": "--force" in options}
    assert len(requests) == len(answers)
    output = capsys.readouterr()
    assert out in output.out
    assert err in output.err


def test_follows_events_across_outages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"id": 7, "at": "2026-11-22T10:00:05.5Z", "kind": "drain", "subject": "a:1", "message": "x\x1b"}
    text, headers = f"data: {json.dumps(event)}\n\n", {"Content-Type": "text/event-stream"}
    stream, outage = httpx2.Response(200, text=text, headers=headers), httpx2.ConnectError("refused")
    answers = iter([stream, outage, outage, KeyboardInterrupt(), stream, outage])
    requests = fake_http(monkeypatch, lambda request: next(answers))
    assert run(["events", "--follow"]) == 0
    output = capsys.readouterr()
    assert re.fullmatch(f"{TIME}  drain               a:1  x\N{REPLACEMENT CHARACTER}\n", output.out)
    assert output.err.count("refused") == 1  # reported once per outage
    assert [request.headers["Last-Event-ID"] for request in requests] == ["0", "7", "7", "7"]
    assert run(["events", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == event
    assert requests[-1].url.query == b"follow=false"
    assert run(["events", "--follow"]) == 1  # it never connected


def test_creates_a_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    create, file = ["token", "create", "--name", "ci", "--role", "viewer"], tmp_path / "token"
    assert run(create) == 0
    out = capsys.readouterr().out
    (entry,) = yaml.safe_load(out.rpartition("#")[0])["api"]["tokens"]
    assert entry == {"name": "ci", "role": "viewer", "sha256": sha256(out.splitlines()[-1].encode())}
    assert run([*create, "--json", "--file", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == entry | {"sha256": sha256(file.read_bytes().strip())}
    assert file.stat().st_mode & 0o777 == 0o600
    assert run([*create, "--file", str(file)]) == 2  # it exists already
    assert run([*create, "--name", ""]) == 2


def test_checks_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "tidevoy.yaml"
    for text, exit_code, problems in (("pd: {urls: ['http://127.0.0.1:2379']}", 0, []), ("x: 1", 2, ["x"])):
        file.write_text(text)
        assert run(["config", "check", str(file)]) == exit_code
        assert str(file) in "".join(capsys.readouterr())
        assert run(["config", "check", "--json", str(file)]) == exit_code
        assert [error["key"] for error in json.loads(capsys.readouterr().out)] == problems


def test_console_script_exits_with_the_code_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tidevoy", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert capsys.readouterr().out.startswith("tidevoy ")


def test_switches_of_an_envoy_are_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer: dict[str, Any] = {"id": "e/1", "offload": "off", "migration": "on", "runtime_off": []}
    answer["overrides"] = {"offload": "off", "migration": None}
    requests = fake_http(monkeypatch, lambda request: answer)
    assert run(["envoys", "set", "e/1", "--offload", "off", "--migration", "default"]) == 0
    assert [f"{r.method} {r.url.raw_path.decode()}" for r in requests] == ["PATCH /v1/envoys/e%2F1"]
    assert json.loads(requests[0].content) == {"offload": "off", "migration": None}
    assert capsys.readouterr().out == "e/1: offload is switched off by an operator\n"
    answer |= {"offload": "off", "migration": "off", "runtime_off": ["migration"]}
    answer["overrides"] = {"offload": None, "migration": None}
    assert run(["envoys", "set", "e/1", "--offload", "on"]) == 0
    expected = "e/1: offload is switched off by the settings; migration is switched off by Envoy's runtime\n"
    assert capsys.readouterr().out == expected
    answer |= {"offload": None, "migration": None, "runtime_off": []}
    assert run(["envoys", "set", "e/1", "--offload", "on"]) == 0
    assert capsys.readouterr().out == "e/1: nothing is switched off\n"
    assert run(["envoys", "set", "e/1"]) == 2

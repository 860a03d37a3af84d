"""The command `top`: one statement, statistics that are off, and the table on a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any
from urllib.parse import parse_qs

import httpx2
import pytest
import yaml

from cli import top
from cli.main import run
from cli.statement_tables import format_seconds, latency_rows
from tests.support.controlplane.cli_process import fake_http

TIME = r"2026-11-2\d \d\d:\d\d:05"  # the time in the answer, in any time zone
LISTING: dict[str, Any] = yaml.safe_load("""
digests: 'on'
since: '2026-11-22T10:00:05.5Z'
window_seconds: 60.0
total: 3
incomplete: [r2 could not be reached]
statements:
  - {digest: ab12cd34ef56ab12, text: "select ?\\nfrom t", count: 120, errors: 2, rows: 240, seconds: 75.5,
     share: 0.75, average_seconds: 0.629, p95_seconds: 1.2, max_seconds: 2.5, per_second: 2.0, user: app,
     node: 'a:1', latency: [{up_to_seconds: 0.5, count: 30}, {up_to_seconds: 1.0, count: 0},
       {up_to_seconds: null, count: 90}]}
  - {digest: cd34, text: null, count: 0, errors: 0, rows: 0, seconds: 0.0, share: 0.0,
     average_seconds: null, p95_seconds: null, max_seconds: 0.0, per_second: 0.0}
others: {count: 7, errors: 0, rows: 0, seconds: 25.1, share: 0.25, average_seconds: 3.5857, p95_seconds: 9.0,
  max_seconds: 120.0, per_second: 0.1167}
""")
ROWS = [
    "SHARE  TIME  COUNT  PER SECOND  AVERAGE  P95  MAX  ERRORS  ROWS  DIGEST  STATEMENT",
    r"75.0%  75.5s  120  2.00  629ms  1.20s  2.50s  2  240  ab12cd34ef56  select \? from t",
    "0.0%  0.00ms  0  0.00  -  -  0.00ms  0  0  cd34  not known",
    "25.0%  25.1s  7  0.12  3.59s  9.00s  2.00min  0  0  -  all other statements",
]
STATEMENT = LISTING["statements"][0]
ONE = LISTING | {"statements": [STATEMENT], "total": 1, "incomplete": []}
OFF = LISTING | {"digests": "off", "statements": [], "total": 0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (0.0, "0.00ms"), (0.00042, "0.42ms"), (0.0099, "9.90ms"), (0.0123, "12.3ms")),
        *((0.42, "420ms"), (1.0, "1.00s"), (12.34, "12.3s"), (99.96, "1.67min"), (36000, "600min")),
    ],
)
def test_times_have_three_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_latency_distribution_has_the_buckets_in_use() -> None:
    bounds = [0.0005, 0.001, 2.5, 10.0, None]
    buckets = [{"up_to_seconds": b, "count": c} for b, c in zip(bounds, [0, 4, 0, 1, 0], strict=True)]
    assert latency_rows(buckets) == [
        ("0.5ms to 1ms", "4", "80.0%", "#" * 40),
        ("1ms to 2.5s", "0", "0.0%", ""),
        ("2.5s to 10s", "1", "20.0%", "#" * 10),
    ]
    assert latency_rows([{"up_to_seconds": None, "count": 0}]) == []


@pytest.mark.parametrize("command", ["top", "top --once"])
def test_statements_are_shown_as_table_or_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    fake_http(monkeypatch, lambda _: LISTING)
    assert run(command.split()) == 0
    output = capsys.readouterr()
    for pattern, line in zip(ROWS, output.out.splitlines(), strict=True):
        assert re.fullmatch(pattern, re.sub(" {2,}", "  ", line)), line
    period, problem = output.err.splitlines()
    assert re.fullmatch(f"tidevoy: 60.0s since {TIME}, sums of all Envoys; 2 of 3 statements .*", period)
    assert problem == "tidevoy: r2 could not be reached"
    assert run([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LISTING


def test_options_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = fake_http(monkeypatch, lambda _: LISTING)
    assert (
        run(
            [
                "top",
                "--sort",
                "p95",
                "--window",
                "5m",
                "--limit",
                "3",
                "--user",
                "app",
                "--node",
                "a:1",
                "--json",
            ]
        )
        == 0
    )
    assert parse_qs(requests[0].url.query.decode()) == {
        "window": ["300"],
        "sort": ["p95"],
        "limit": ["3"],
        "user": ["app"],
        "node": ["a:1"],
    }


def test_one_statement_by_user_node_and_latency(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = fake_http(monkeypatch, lambda _: ONE)
    assert run(["top", "--digest", "AB12"]) == 0
    assert [re.search(rb"digest=ab12(&by=(\w+))?$", r.url.query) is not None for r in requests] == [True] * 3
    lines = [re.sub(" {2,}", "  ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["digest: ab12cd34ef56ab12", "statement: select ?\N{REPLACEMENT CHARACTER}from t"]
    assert "app  75.0%  75.5s  120  2.00  629ms  1.20s  2.50s  2  240" in lines
    assert "a:1  75.0%  75.5s  120  2.00  629ms  1.20s  2.50s  2  240" in lines
    assert "0ms to 500ms  30  25.0%  #############" in lines
    assert f"over 1s  90  75.0%  {'#' * 40}" in lines
    assert run(["top", "--digest", "ab12", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == ONE | {"by_user": ONE["statements"], "by_node": ONE["statements"]}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (LISTING, "3 digests begin with ab; write more digits"),
        (ONE | {"statements": [], "total": 0}, "no statement ran whose digest begins with ab"),
    ],
)
def test_digest_must_name_one_statement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, error: str
) -> None:
    fake_http(monkeypatch, lambda _: answer)
    assert run(["top", "--digest", "ab"]) == 1
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top", "top --once", "top --digest ab"])
def test_says_how_to_turn_statistics_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    fake_http(monkeypatch, lambda _: OFF)
    assert run(command.split()) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "set `statements.digests: on`" in output.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_refreshes_on_a_terminal_across_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(top, "_REFRESH_SECONDS", 0.0)
    outage = httpx2.ConnectError("refused")
    answers = iter([LISTING, outage, OFF, KeyboardInterrupt()])
    requests = fake_http(monkeypatch, lambda _: next(answers))
    assert run(["top"]) == 0
    assert len(requests) == 4
    shown = terminal.getvalue()
    assert "all other statements" in shown
    assert "refused" in shown
    assert "set `statements.digests: on`" in shown
    assert not re.search(r"\x1b\[3\dm", shown)  # no colors

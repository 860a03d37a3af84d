"""`tidevoy traffic replay` and `compare`: arguments, tables, pages and exit codes, with a fake program."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from cli import replay_program
from cli.main import run
from controlplane.model.comparison import Comparison
from controlplane.verification.replay_program import ReplayProgramMissing
from tests.support.controlplane.comparisons import (
    SAME,
    comparison_with,
    digest_comparison,
    upgrade_with_problems,
)

Install = Callable[[str], Path]
SUMMARY = {
    "settings": {"speed": 1.0},
    "totals": {
        "replayed": 12,
        "errors_by_code": {"1146": 1},
        "skipped": {"may_write": 3},
        "latency_us": 12_345,
        "first_ns": 1_795_818_400_000_000_000,
        "last_ns": None,
        "seconds": 0.25,
    },
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a shell script as the program; it writes its arguments to a file."""

    def install_script(script: str) -> Path:
        program, arguments = tmp_path / "tidevoy-replay", tmp_path / "arguments"
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(arguments))}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(replay_program, "find_replay_program", lambda: program)
        return arguments

    return install_script


def install_comparison(install: Install, comparison: Comparison, tmp_path: Path) -> Path:
    """Install a program whose `compare A B --json FILE` writes this comparison."""
    source = tmp_path / "source.json"
    source.write_text(json.dumps(asdict(comparison)))
    return install(f'cp {shlex.quote(str(source))} "$5"')


def test_replay_passes_its_options_and_shows_the_totals(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = install(f"echo '{json.dumps(SUMMARY)}'; echo halfway >&2")
    options = ["--target", "10.0.0.1:4000", "--output", "out", "--speed", "2.5", "--reads-only"]
    more = ["--from", "2026-11-28T10:00:00Z", "--warm-up", "10s", "--users", "a,b", "--user", "-x"]
    assert run(["traffic", "replay", "one", "two", *options, *more]) == 0
    assert arguments.read_text().split() == [
        *("run", "--json", "--target=10.0.0.1:4000", "--output=out", "--user=-x", "--speed=2.5"),
        *("--users=a,b", "--from=2026-11-28T10:00:00Z", "--warm-up=10s", "--reads-only", "--", "one", "two"),
    ]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[0] != "first"] == [
        ["TOTAL", "VALUE"],
        ["replayed", "12"],
        ["errors", "by", "code", "1146", "1"],
        ["skipped", "may", "write", "3"],
        ["latency", "12.3ms"],
        ["seconds", "0.2"],
    ]
    (first,) = [row for row in rows if row[0] == "first"]
    assert re.fullmatch(r"2026-11-2\d \d\d:\d\d:40", " ".join(first[1:]))


def test_replay_prints_the_summary_as_json(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(f"echo '{json.dumps(SUMMARY)}'")
    assert run(["traffic", "replay", "one", "--target", "a:1", "--output", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SUMMARY


@pytest.mark.parametrize("code", [1, 2])
def test_exit_code_of_the_program_is_kept(
    install: Install, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    install(f"echo '{json.dumps(SUMMARY)}'; exit {code}")
    assert run(["traffic", "replay", "one", "--target", "a:1", "--output", "out"]) == code
    assert "replayed" in capsys.readouterr().out, "a replay that has ended early has a summary"
    assert run(["traffic", "compare", "a", "b"]) == code


def test_missing_program_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nothing() -> Path:
        raise ReplayProgramMissing

    monkeypatch.setattr(replay_program, "find_replay_program", find_nothing)
    assert run(["traffic", "compare", "a", "b"]) == 1
    assert "tidevoy-replay is not installed; install Tidevoy's wheel" in capsys.readouterr().err


def test_compare_prints_new_errors_and_the_slowest_first(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = install_comparison(install, upgrade_with_problems(), tmp_path)
    assert run(["traffic", "compare", "old", "new", "--limit", "2"]) == 0
    assert arguments.read_text().split()[:4] == ["compare", "old", "new", "--json"]
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [" ".join(line.split()) for line in lines[:6]] == [
        "ERROR ONLY ON COUNT DIGEST STATEMENT",
        "1146 new 7 eeeeeeeeeeee select ? from e",
        "",
        "RATIO OLD NEW OLD P95 NEW P95 PAIRS OLD ERRORS NEW ERRORS DIFFER DIGEST STATEMENT",
        "- 1.00ms - 2.00ms - 100 0 7 0 eeeeeeeeeeee select ? from e",
        "2.10 (2.00 to 2.20) 1.00ms 2.10ms 2.00ms 4.20ms 100 0 0 0 555555555555 select ? from 5",
    ]
    assert lines[7].startswith("new error 1146 (7 times)")
    assert lines[9].startswith("note: 3 of 100 results differ")
    assert "400 statements of 4 digests ran on both sides; 3 of them have differing results" in shown.err
    assert "2 of 4 digests are shown" in shown.err


def test_max_ratio_decides_the_exit_code(install: Install, tmp_path: Path) -> None:
    slower = comparison_with(digest_comparison(SAME, 1.8, differing_results=1))
    install_comparison(install, slower, tmp_path)
    compare = ["traffic", "compare", "old", "new"]
    assert run(compare) == 0
    assert run([*compare, "--max-ratio", "1.5"]) == 1
    assert run([*compare, "--max-ratio", "2"]) == 0
    assert run([*compare, "--max-ratio", "2", "--results-must-match"]) == 1
    assert run([*compare, "--max-ratio", "nan"]) == 2


def test_compare_writes_json_and_a_page(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_comparison(install, upgrade_with_problems(), tmp_path)
    page = tmp_path / "page.html"
    assert run(["traffic", "compare", "old", "new", "--json", "--html", str(page)]) == 0
    assert len(json.loads(capsys.readouterr().out)["digests"]) == 4
    text = page.read_text()
    assert "<h1>Comparison of old and new</h1>" in text
    assert "new error 1146" in text
    assert run(["traffic", "compare", "old", "new", "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html cannot be written" in capsys.readouterr().err

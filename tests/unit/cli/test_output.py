"""Output of commands."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cli.config import describe_reload
from cli.envoys import describe_state
from cli.main import run
from cli.nodes import show_ejections
from cli.output import format_count, format_duration, format_plain_table


def test_plain_table_prints_one_full_line_per_row() -> None:
    assert format_plain_table(("A", "LONG"), [("x" * 100, "y"), ("z", "")]) == [
        "A" + " " * 101 + "LONG",
        "x" * 100 + "  y",
        "z",
    ]


def test_table_replaces_control_characters() -> None:
    assert format_plain_table(("A",), [("v1\x1b[2J\n",)]) == ["A", "v1\ufffd[2J\ufffd"]


def test_table_without_rows_prints_only_headers() -> None:
    assert format_plain_table(("A", "B"), []) == ["A  B"]


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (61, "1:01"), (3723, "1:02:03")])
def test_formats_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_unknown_count_differs_from_zero() -> None:
    assert (format_count(None), format_count(0)) == ("-", "0")


@pytest.mark.parametrize(
    ("acked", "published", "text"),
    [
        ("", "", "waiting for the first plan"),
        ("", "7", "at nothing, published 7"),
        ("6", "7", "at 6, published 7"),
        ("7", "7", "up to date (7)"),
    ],
)
def test_describes_the_state_of_a_connected_envoy(acked: str, published: str, text: str) -> None:
    versions = {"acked_version": acked, "published_version": published}
    connected = {"connected_since": "2026-01-01T00:00:00Z", **versions}
    assert describe_state({**connected, "overrides": {"ready": None}}) == text
    if published:
        not_ready = describe_state({**connected, "overrides": {"ready": "off"}})
        assert not_ready == f"{text}; not ready (set by an operator)"


def test_describes_what_a_reload_changed() -> None:
    keys = ("applied", "applied_by_module", "needs_new_envoys", "needs_restart")
    none: dict[str, list[str]] = {key: [] for key in keys}
    assert describe_reload(none) == ["nothing has changed"]
    lines = describe_reload(
        {**none, "applied": ["a", "b"], "applied_by_module": ["c"], "needs_restart": ["d"]}
    )
    assert [line.rpartition(": ")[2] for line in lines] == ["a, b", "c", "d"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["drain"],
        ["drain", "a:1", "--deadline", "soon"],
        ["drain", "no-port"],
        ["weight", "a:1", "0"],
        ["weight", "a:1", "10001"],
        ["nodes", "--url", "3080"],
        ["add", "a:1", "--label", "zone"],
        ["config", "check", "/nowhere/tidevoy.yaml"],
        ["bootstrap", "--cert", "x"],
        ["bootstrap", "--control-plane", "0.0.0.0:18000"],
        ["bootstrap", "--admin", "9901"],
        ["bootstrap", "--admin", "localhost:9901"],
        ["bootstrap", "--admin", "0.0.0.0:9901"],
        ["bootstrap", "--admin", "[::]:0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.strip()
    assert "Traceback" not in output.err


def test_unreachable_control_plane_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEVOY_URL", "http://127.0.0.1:1")
    assert run(["nodes"]) == 1
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert "http://127.0.0.1:1 does not answer (connection refused)" in output.err
    assert "tidevoy serve" in output.err


def test_missing_package_disables_only_its_own_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("magic", "no_such_package.magic:register", "tidevoy.commands")
    monkeypatch.setattr("cli.main.entry_points", lambda group: [entry])
    assert run(["--help"]) == 0
    assert "no_such_package" in capsys.readouterr().out
    assert run(["magic", "--anything"]) == 1
    assert "`tidevoy magic` needs no_such_package" in capsys.readouterr().err
    assert run(["config", "--help"]) == 0


def test_runs_a_command_registered_by_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--help"]) == 0
    assert "Ctrl-C" in capsys.readouterr().out


def test_bootstrap_contains_the_named_control_planes(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert run(["bootstrap", "--control-plane", "10.0.0.1:18000", "--id", "envoy-1"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["node"]["id"] == "envoy-1"
    assert "10.0.0.1" in json.dumps(document)


def test_ejections_are_grouped_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def ejection(envoy: str, reason: str, second: int) -> dict[str, str]:
        return {"envoy": envoy, "reason": reason, "since": f"2026-11-22T10:00:{second:02}Z"}

    ejections = [ejection("a", "connect", 7), ejection("b", "tls", 3), ejection("c", "connect", 5)]
    show_ejections({"address": "n:4000", "ejected_by": ejections})
    connect_line, tls_line = capsys.readouterr().err.splitlines()
    assert connect_line.startswith("tidevoy: n:4000: ejected by Envoy c and 1 more since ")
    assert connect_line.endswith(":05, reason connect")
    assert tls_line.startswith("tidevoy: n:4000: ejected by Envoy b since ")
    assert tls_line.endswith(":03, reason tls")

"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cli.config import describe_reload
from cli.envoys import describe_state
from cli.main import run
from cli.nodes import show_ejections
from cli.output import format_count, format_duration, format_plain_table


def test_a_plain_table_has_one_whole_line_a_row() -> None:
    assert format_plain_table(("A", "LONG"), [("x" * 100, "y"), ("z", "")]) == [
        "A" + " " * 101 + "LONG",
        "x" * 100 + "  y",
        "z",
    ]


def test_what_others_wrote_cannot_command_the_terminal() -> None:
    assert format_plain_table(("A",), [("v1\x1b[2J\n",)]) == ["A", "v1\ufffd[2J\ufffd"]


def test_a_table_without_rows_is_its_heads() -> None:
    assert format_plain_table(("A", "B"), []) == ["A  B"]


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (61, "1:01"), (3723, "1:02:03")])
def test_elapsed(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_an_unknown_count_is_no_zero() -> None:
    assert (format_count(None), format_count(0)) == ("-", "0")


@pytest.mark.parametrize(
    ("acked", "published", "text"),
    [
        ("", "", "waits for a first plan"),
        ("", "7", "at nothing, published 7"),
        ("6", "7", "at 6, published 7"),
        ("7", "7", "up to date (7)"),
    ],
)
def test_the_state_of_an_envoy(acked: str, published: str, text: str) -> None:
    seen = {"connected_since": "2026-01-01T00:00:00Z", "acked_version": acked, "published_version": published}
    assert describe_state(seen) == text


def test_what_a_reload_changed() -> None:
    assert describe_reload({"now": [], "new_envoys": [], "restart": []}) == ["nothing has changed"]
    lines = describe_reload({"now": ["a", "b"], "new_envoys": [], "restart": ["c"]})
    assert [line.rpartition(": ")[2] for line in lines] == ["a, b", "c"]


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
def test_wrong_usage_gives_2(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip()
    assert "Traceback" not in shown.err


def test_nobody_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEVOY_URL", "http://127.0.0.1:1")
    assert run(["nodes"]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "http://127.0.0.1:1 does not answer (connection refused)" in shown.err
    assert "tidevoy serve" in shown.err


def test_a_missing_package_breaks_only_its_own_command(
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


def test_a_command_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--help"]) == 0
    assert "Ctrl-C" in capsys.readouterr().out


def test_bootstrap_is_for_the_named_control_planes(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert run(["bootstrap", "--control-plane", "10.0.0.1:18000", "--id", "envoy-1"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["node"]["id"] == "envoy-1"
    assert "10.0.0.1" in json.dumps(document)


def test_ejections_by_many_envoys_are_one_line_for_each_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def ejected(envoy: str, reason: str, second: int) -> dict[str, str]:
        return {"envoy": envoy, "reason": reason, "since": f"2026-11-22T10:00:{second:02}Z"}

    ejections = [ejected("a", "connect", 7), ejected("b", "tls", 3), ejected("c", "connect", 5)]
    show_ejections({"address": "n:4000", "ejected_by": ejections})
    one, other = capsys.readouterr().err.splitlines()
    assert one.startswith("tidevoy: n:4000: ejected by Envoy c and 1 more since ")
    assert one.endswith(":05, reason connect")
    assert other.startswith("tidevoy: n:4000: ejected by Envoy b since ")
    assert other.endswith(":03, reason tls")

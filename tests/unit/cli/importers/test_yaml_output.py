"""YAML that importers write, and the draft that collects it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.importers.draft import SettingsDraft, SourceKey
from cli.importers.report import Outcome, difference_rows, table_rows
from cli.importers.yaml_output import Assignment, Item, format_value, render
from controlplane.config.yaml_loader import parse_yaml
from tests.support.imports import load_settings

KEY = SourceKey("the.key", 7)
_texts = st.text(st.characters(exclude_categories=["Cs"]))
_scalars = st.one_of(_texts, st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (15.0, "15"),
        (0.5, "0.5"),
        ("10.0.0.1:6000", "10.0.0.1:6000"),
        ("/etc/x.pem", "/etc/x.pem"),
        ("off", "off"),
        ("true", '"true"'),
        ("5", '"5"'),
        ("1e3", '"1e3"'),
        ("[::]:6000", '"[::]:6000"'),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("", '""'),
        ("a: b", '"a: b"'),
        (["a", 1], "[a, 1]"),
        ({"role": "backup", "x y": "#"}, '{role: backup, "x y": "#"}'),
    ],
)
def test_formats_values(value: Any, text: str) -> None:
    assert format_value(value) == text


@given(st.one_of(_scalars, st.lists(_scalars, max_size=4), st.dictionaries(_texts, _texts, max_size=3)))
def test_formatted_values_are_loaded_again(value: Any) -> None:
    loaded, _ = parse_yaml(f"key: {format_value(value)}", "text")
    assert loaded == {"key": value}


def test_renders_sections_comments_and_lists() -> None:
    assignments = [
        Assignment(
            ("nodes",), [Item({"address": "a:1", "weight": 5}, "server a"), Item({"address": "b:1"}, "")]
        ),
        Assignment(("tls", "client", "mode"), "optional", ["x", "y"], todo="decide"),
        Assignment(("tls", "client", "cert"), "/c", [], remark="a remark"),
        Assignment(("tls", "allow_cleartext_backend"), True),
        Assignment(("state_dir",), "/s", ["z\x1b"]),
    ]
    assert render(["Intro."], ["act"], assignments) == (
        "# Intro.\n"
        "# TODO: act\n"
        "\n"
        "nodes:\n"
        "  - address: a:1  # server a\n"
        "    weight: 5\n"
        "  - address: b:1\n"
        "\n"
        "tls:\n"
        "  client:\n"
        "    # TODO: decide\n"
        "    mode: optional  # x, y\n"
        "    # a remark\n"
        "    cert: /c\n"
        "  allow_cleartext_backend: true\n"
        "\n"
        "state_dir: /s  # z\ufffd\n"
    )


def test_an_empty_draft_loads() -> None:
    result = SettingsDraft().finish("a test", ["Nothing."])
    lines = result.yaml.splitlines()
    assert lines[0].startswith("# Made by a test.")
    assert lines[-1] == "# Nothing."
    assert all(line.startswith("#") for line in lines)
    load_settings(result)


def test_rejects_only_the_invalid_items_of_a_list() -> None:
    draft = SettingsDraft()
    for address in ("a:1", "b", "a:1", "c:1"):
        draft.append(SourceKey(f"server {address}", 1), "nodes", {"address": address})
    result = draft.finish("a test", [])
    assert [node.address for node in load_settings(result).nodes] == ["a:1", "c:1"]
    outcomes = [row.outcome for row in result.rows]
    assert outcomes == [Outcome.MAPPED, Outcome.NO_EQUIVALENT, Outcome.NO_EQUIVALENT, Outcome.MAPPED]
    assert any("has no port" in todo for todo in result.todos)
    assert any("is listed twice" in todo for todo in result.todos)


def test_a_list_without_valid_items_is_left_out() -> None:
    draft = SettingsDraft()
    draft.append(KEY, "nodes", {"address": "b"})
    result = draft.finish("a test", [])
    assert load_settings(result).nodes == ()
    assert "nodes:" not in result.yaml.replace("# TODO: nodes", "")


def test_settings_that_contradict_each_other_are_removed_one_after_the_other() -> None:
    draft = SettingsDraft()
    draft.map(KEY, "tls.client.mode", "required")
    draft.map(KEY, "tls.client.cert", "/c.pem")
    result = draft.finish("a test", [])
    assert load_settings(result).tls.client.mode == "disabled"
    assert [row.outcome for row in result.rows] == [Outcome.NO_EQUIVALENT] * 2
    assert len(result.todos) == 2
    assert result.rows[0].value == ""


def test_rejects_values_of_ports_that_conflict() -> None:
    draft = SettingsDraft()
    draft.map(KEY, "sql.listen", "0.0.0.0:3080")
    result = draft.finish("a test", [])
    assert load_settings(result).sql.listen == "0.0.0.0:6000"
    assert any("have the same port" in todo for todo in result.todos)


def test_tables_are_sorted_by_line() -> None:
    draft = SettingsDraft()
    draft.needless(SourceKey("b", 5), "why")
    draft.no_equivalent(SourceKey("a", 2), "instead")
    draft.unknown(SourceKey("c", None), "what")
    result = draft.finish("a test", [])
    assert table_rows(result.rows) == [
        ("-", "c", "unknown", "what"),
        ("2", "a", "no equivalent", "instead"),
        ("5", "b", "needless", "why"),
    ]
    assert result.summary() == "keys: 1 needless, 1 no equivalent, 1 unknown; lines with TODO: 0"
    assert difference_rows(result.differences) == []

"""Lines of the keys in a TOML file."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from cli.importers.tiproxy.toml_lines import TomlPath, key_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\n\nb = 2", {("a",): 1, ("b",): 3}),
        ("# x\n[t] # y\na = 1", {("t",): 2, ("t", "a"): 3}),
        ('"a.b".c = 1', {("a.b",): 1, ("a.b", "c"): 1}),
        ("[ t . 'u v' ]\na=1", {("t",): 1, ("t", "u v"): 1, ("t", "u v", "a"): 2}),
        ('a = """x\n[no]\nb = 1\\""""\nc = 1', {("a",): 1, ("c",): 4}),
        ("a = '''x\n''''\nb = ''\nc = 1", {("a",): 1, ("b",): 3, ("c",): 4}),
        ('a = [ # ]\n "]", {x = "}"},\n]\nb = 1', {("a",): 1, ("b",): 4}),
        ("a = {b = [1, 2]}\nc = 1", {("a",): 1, ("c",): 2}),
        (
            "[[t]]\na = 1\n[[t]]\na = 2\n[t.u]\nb = 3",
            {
                ("t",): 1,
                ("t", 0): 1,
                ("t", 0, "a"): 2,
                ("t", 1): 3,
                ("t", 1, "a"): 4,
                ("t", 1, "u"): 5,
                ("t", 1, "u", "b"): 6,
            },
        ),
        ("a = 1979-05-27 07:32:00\r\nb = 1", {("a",): 1, ("b",): 2}),
        ("", {}),
    ],
)
def test_finds_lines(text: str, expected: dict[TomlPath, int]) -> None:
    data: dict[str, Any] = tomllib.loads(text)  # the texts are valid
    assert key_lines(text) == expected
    assert {path[0] for path in expected} == set(data)

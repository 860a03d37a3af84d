"""Parsing of option values."""

from __future__ import annotations

import pytest
import typer

from cli import options
from cli.client import node_path
from cli.errors import EXIT_USAGE, CliError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0.0),
        ("600", 600.0),
        ("1.5", 1.5),
        ("10m", 600.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("1d2h3m4s", 93784.0),
        ("7d", 604_800.0),
    ],
)
def test_parses_durations(text: str, expected: float) -> None:
    assert options.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "m", "10x", "-1", "1m1h", "1e3", "nan", "inf", "10 m", "8d", "604801"])
def test_rejects_invalid_durations(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        options.parse_duration(text)


def test_parses_labels() -> None:
    assert options.parse_labels(["zone=a", "empty=", "both=x=y"]) == {"zone": "a", "empty": "", "both": "x=y"}


@pytest.mark.parametrize("pair", ["zone", "=a", ""])
def test_rejects_invalid_labels(pair: str) -> None:
    with pytest.raises(typer.BadParameter):
        options.parse_labels([pair])


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("127.0.0.1:4000", "/v1/nodes/127.0.0.1%3A4000"),
        ("[FD00::1]:4000", "/v1/nodes/%5Bfd00%3A%3A1%5D%3A4000"),
        ("tidb-0.peer:4000", "/v1/nodes/tidb-0.peer%3A4000"),
    ],
)
def test_node_path_is_canonical_and_quoted(address: str, path: str) -> None:
    assert node_path(address) == path


@pytest.mark.parametrize("address", ["", "host", "../x", "::1:4000", "a:0", "a/b:1"])
def test_invalid_address_is_a_usage_error(address: str) -> None:
    with pytest.raises(CliError) as error:
        node_path(address)
    assert error.value.exit_code == EXIT_USAGE

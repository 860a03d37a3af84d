import json
from pathlib import Path

import pytest

from bench.load_client import LoadClientResult, LoadTarget, LoginOptions, SliceResult

SLICE = {
    "seconds": 0.0297,
    "latencies_us": [98.7, 1234.5],
    "new_connections_us": [2000.0],
    "errors": 0,
    "errors_by_kind": {},
    "details": [],
}


def test_a_slice_is_in_milliseconds() -> None:
    found = LoadClientResult.parse(json.dumps(SLICE) + "\n")
    measured = SliceResult.from_result(found)
    assert measured.seconds == 0.0297
    assert measured.latencies == pytest.approx([0.0987, 1.2345])
    assert measured.new_connections == [2.0]
    assert (found.errors, found.error_text) == (0, "")


def test_the_last_line_is_the_result() -> None:
    last = {"connected": 5, "alive": 5, "errors": 0, "errors_by_kind": {}, "details": []}
    found = LoadClientResult.parse('{"connected": 5}\n' + json.dumps(last) + "\n")
    assert found.figures["alive"] == 5


@pytest.mark.parametrize("output", ["", "\n", "Segmentation fault\n", "[1]\n", '{"connected": 5}\n'])
def test_what_is_no_result_is_told(output: str) -> None:
    with pytest.raises(ValueError, match=r"printed no result|Expecting value"):
        LoadClientResult.parse(output)


def test_errors_are_told_by_kind_and_by_what_the_first_said() -> None:
    told = ["session 3: row 1 has at byte 7 of 27", "session 9: nothing came within 30 s"]
    figures = SLICE | {"errors": 3, "errors_by_kind": {"content": 2, "slow": 1}, "details": told}
    found = LoadClientResult.parse(json.dumps(figures))
    assert found.errors == 3
    assert found.error_text.splitlines() == ["content: 2, slow: 1", *told]


def test_certificates_are_checked_where_an_authority_is_named() -> None:
    server = ["--address", "127.0.0.1:4000", "--tls"]
    root = ["--user", "root", "--password", ""]
    assert LoginOptions().command_options(4000) == [*server, "none", *root]
    assert LoginOptions("first", Path("/ca.pem")).command_options(4000) == [
        *server,
        "first",
        *root,
        "--ca",
        "/ca.pem",
    ]


def test_targets_say_where_tls_begins() -> None:
    assert str(LoadTarget(4000)) == "127.0.0.1:4000,tls=none"
    assert str(LoadTarget(4000, "mysql")) == "127.0.0.1:4000,tls=mysql"

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


def test_slice_latencies_are_in_milliseconds() -> None:
    result = LoadClientResult.parse(json.dumps(SLICE) + "\n")
    slice_result = SliceResult.from_result(result)
    assert slice_result.seconds == 0.0297
    assert slice_result.latencies == pytest.approx([0.0987, 1.2345])
    assert slice_result.new_connections == [2.0]
    assert (result.errors, result.error_text) == (0, "")


def test_parses_the_last_output_line() -> None:
    last = {"connected": 5, "alive": 5, "errors": 0, "errors_by_kind": {}, "details": []}
    result = LoadClientResult.parse('{"connected": 5}\n' + json.dumps(last) + "\n")
    assert result.figures["alive"] == 5


@pytest.mark.parametrize("output", ["", "\n", "Segmentation fault\n", "[1]\n", '{"connected": 5}\n'])
def test_rejects_output_without_a_result(output: str) -> None:
    with pytest.raises(ValueError, match=r"printed no result|Expecting value"):
        LoadClientResult.parse(output)


def test_error_text_lists_kinds_and_details() -> None:
    details = ["session 3: row 1 has at byte 7 of 27", "session 9: nothing came within 30 s"]
    figures = SLICE | {"errors": 3, "errors_by_kind": {"content": 2, "slow": 1}, "details": details}
    result = LoadClientResult.parse(json.dumps(figures))
    assert result.errors == 3
    assert result.error_text.splitlines() == ["content: 2, slow: 1", *details]


def test_ca_option_enables_certificate_checks() -> None:
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


def test_target_text_contains_the_tls_mode() -> None:
    assert str(LoadTarget(4000)) == "127.0.0.1:4000,tls=none"
    assert str(LoadTarget(4000, "mysql")) == "127.0.0.1:4000,tls=mysql"

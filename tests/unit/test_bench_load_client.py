import json
from pathlib import Path

import pytest

from bench.load_client import Access, Found
from bench.sysbench import Outcome

SELECTED = {
    "queries": 29_391,
    "seconds": 2.0,
    "per_second": 14_694.5,
    "p50_ms": 0.74,
    "p95_ms": 3.3,
    "p99_ms": 5.6,
    "max_ms": 20.0,
    "errors": 0,
    "errors_by_kind": {},
    "details": [],
}


def test_a_selection_is_an_outcome() -> None:
    found = Found.read(json.dumps(SELECTED) + "\n")
    assert found.outcome() == Outcome(29_391, 14_694.5, 3.3)
    assert (found.errors, found.told) == (0, "")


def test_the_last_line_is_the_result() -> None:
    last = {"connected": 5, "alive": 5, "errors": 0, "errors_by_kind": {}, "details": []}
    found = Found.read('{"connected": 5}\n' + json.dumps(last) + "\n")
    assert found.figures["alive"] == 5


@pytest.mark.parametrize("output", ["", "\n", "Segmentation fault\n", "[1]\n", '{"connected": 5}\n'])
def test_what_is_no_result_is_told(output: str) -> None:
    with pytest.raises(ValueError, match=r"printed no result|Expecting value"):
        Found.read(output)


def test_errors_are_told_by_kind_and_by_what_the_first_said() -> None:
    told = ["session 3: row 1 has at byte 7 of 27", "session 9: nothing came within 30 s"]
    figures = SELECTED | {"errors": 3, "errors_by_kind": {"content": 2, "slow": 1}, "details": told}
    found = Found.read(json.dumps(figures))
    assert found.errors == 3
    assert found.told.splitlines() == ["content: 2, slow: 1", *told]


def test_certificates_are_checked_where_an_authority_is_named() -> None:
    root = ["--address", "127.0.0.1:4000", "--user", "root", "--password", ""]
    assert Access().options(4000) == [*root, "--tls", "none"]
    assert Access("first", Path("/ca.pem")).options(4000) == [*root, "--tls", "first", "--ca", "/ca.pem"]

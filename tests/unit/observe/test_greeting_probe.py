"""Evaluation of the first packet of a SQL connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.health import CheckStatus
from controlplane.observe.health.probes import evaluate_greeting

GREETING = (
    b"\x0a8.0.11-TiDB-v8.5.3\x00\x07\x00\x00\x00saltsalt\x00\xff\xff\x2e\x02\x00\xff\xff\x15" + b"\x00" * 10
)
PORT = "the SQL port 10.0.0.1:4000"


def test_greeting_passes_with_its_version() -> None:
    result = evaluate_greeting(GREETING, PORT)
    assert result.status is CheckStatus.PASS
    assert result.version == "8.0.11-TiDB-v8.5.3"
    assert result.reason == f"{PORT} greets"


@pytest.mark.parametrize(
    ("packet", "error"),
    [
        (b"\xff\x10\x04Too many connections", "error 1040, Too many connections"),
        (b"\xff\x10\x04#08004Too many connections", "error 1040, Too many connections"),
        (b"\xff\x51\x04#HY000PROXY protocol\nheader\x00", "error 1105, PROXY protocol?header?"),
        (b"\xff\x10\x04", "error 1040, "),
        (b"\xff\x6a\x04\xff\xfe", "error 1130, \ufffd\ufffd"),
    ],
)
def test_error_packet_fails_with_code_and_text(packet: bytes, error: str) -> None:
    result = evaluate_greeting(packet, PORT)
    assert result.status is CheckStatus.FAIL
    assert result.reason == f"{PORT} rejects sessions: {error}"


@pytest.mark.parametrize("packet", [b"\x095.0\x00", b"\x0a8.0.11", b"\xff", b"\xff\x10", b"\x00", b"Hello"])
def test_any_other_packet_fails(packet: bytes) -> None:
    result = evaluate_greeting(packet, PORT)
    assert result.status is CheckStatus.FAIL
    assert result.reason == f"{PORT} sends a first packet that is not a MySQL greeting"


@given(st.binary(min_size=1, max_size=600))
def test_reason_is_one_line_of_bounded_length(packet: bytes) -> None:
    result = evaluate_greeting(packet, PORT)
    assert len(result.reason) < 300
    assert result.reason.isprintable()
    assert (result.status is CheckStatus.PASS) == (packet[0] == 10 and b"\x00" in packet[1:])
    assert len(result.version) <= 200

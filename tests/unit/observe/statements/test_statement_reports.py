"""Which reports of statements are valid, and how they are read."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.statements import COUNT, MAX_MICROSECONDS, StatementKey
from controlplane.module_calls import InvalidModuleMessage, decode
from controlplane.observe.envoy_reports.statement_reports import parse_report
from controlplane.observe.envoy_reports.statements_pb2 import ReportRequest
from tests.support.controlplane.statement_reports import digest_of, report, report_message, row, text_of


def read(data: bytes) -> None:
    """Read a report as the service does. Raises InvalidModuleMessage."""
    parse_report(decode(ReportRequest, data), "envoy-1")


def test_rows_of_a_report() -> None:
    parsed = report(row(1), row(1), row(7, "", "n"), row(0, "", "n"), sequence=5)
    assert (parsed.sequence, parsed.texts) == (5, {digest_of(1): text_of(1), digest_of(7): text_of(7)})
    assert {key: counts[COUNT] for key, counts in parsed.rows.items()} == {
        StatementKey(digest_of(1), "app", "10.0.0.1:4000", "envoy-1"): 2,
        StatementKey(digest_of(7), "", "n", "envoy-1"): 1,
        StatementKey("", "", "n", "envoy-1"): 1,
    }
    assert parsed.rows[StatementKey("", "", "n", "envoy-1")][MAX_MICROSECONDS] == 2000


@pytest.mark.parametrize(
    ("rows", "values", "problem"),
    [
        ([row()], {"instance": "x"}, "instance"),
        ([row()], {"instance": "0123456789abcdef\n"}, "instance"),
        ([row()], {"sequence": 0}, "sequence is 0"),
        ([row()], {"statements": []}, "does not have"),
        ([row()], {"statements": [{"digest": b"short", "text": ""}]}, "digest"),
        ([row()], {"statements": [{"digest": b"d" * 32, "text": "x" * 2049}]}, "text"),
        ([row()], {"statements": [{"digest": b"d" * 32, "text": ""}] * 5001}, "more than"),
        ([row()] * 20_001, {}, "more than"),
        ([row(user="u" * 513)], {}, "user or a node"),
        ([row(node="\u00e4" * 257)], {}, "user or a node"),
        ([row(latency=[])], {}, "latency buckets"),
        ([row(latency=[1] * 15)], {}, "latency buckets"),
        ([row(count=1 << 53)], {}, "or more"),
        ([row(latency=[1 << 60] * 14)], {}, "or more"),
    ],
)
def test_invalid_report(rows: list[dict[str, Any]], values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidModuleMessage, match=problem):
        read(report_message(*rows, **values).SerializeToString())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_invalid(data: bytes) -> None:
    with suppress(InvalidModuleMessage):
        read(data)

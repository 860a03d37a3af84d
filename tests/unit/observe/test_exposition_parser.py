"""Parsing of the response to `GET /metrics` of a TiDB server."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.node_metrics import CounterSample
from controlplane.observe.node_metrics.exposition_parser import TIDB_SERIES, parse_exposition

RESPONSE = b"""\
# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1234.5
process_cpu_seconds_total_created 9
process_resident_memory_bytes 1.073741824e+09
tidb_server_maxprocs 16
tidb_server_memory_quota_bytes 0
tidb_server_query_total{result="OK",type="Select"} 17
pd_client_cmd_handle_cmds_duration_seconds_bucket{type="tso",le="0.1"} 77
pd_client_cmd_handle_cmds_duration_seconds_count{type="tso"} 100
pd_client_cmd_handle_cmds_duration_seconds_count{type="wait"} 50
pd_client_cmd_handle_failed_cmds_duration_seconds_count{type="tso"} 3
tidb_tikvclient_request_seconds_count{type="Cop",store="1",scope="global"} 40
tidb_tikvclient_request_seconds_count{type="Get",store="4",scope="global"} 2
tidb_tikvclient_backoff_seconds_count{type="tikvRPC"} 5
tidb_tikvclient_backoff_seconds_count{type="txnLock"} 70
"""
EXPECTED = CounterSample(7.0, 1234.5, 16.0, 1073741824.0, 0.0, 100.0, 3.0, 42.0, 5.0)


def parse(*parts: bytes) -> CounterSample | None:
    return parse_exposition(b"".join(parts), 7.0)


def parse_cpu(value: str) -> float | None:
    sample = parse(f"process_cpu_seconds_total {value}\n".encode())
    return sample.cpu_seconds if sample is not None else None


def test_series_are_found_and_summed_over_labels() -> None:
    assert parse(RESPONSE) == EXPECTED


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12", 12.0),
        ("+1.5e3", 1500.0),
        (".5", 0.5),
        ("1.7976931348623157e+308", 1.7976931348623157e308),
        ("3 1767225600123", 3.0),
        ("3\t-1 ", 3.0),
        ("3\r", 3.0),
        *(
            (parser, None)
            for parser in ("NaN", "+Inf", "-Inf", "1e999", "-1", "1_000", "0x10", "", "3 4 5", "3x")
        ),
    ],
)
def test_values_other_than_plain_numbers_are_ignored(value: str, expected: float | None) -> None:
    assert parse_cpu(value) == expected


def test_nan_value_does_not_affect_other_series() -> None:
    sample = parse(b'tidb_tikvclient_request_seconds_count{type="a"} NaN\n' + RESPONSE)
    assert sample == EXPECTED


def test_infinite_sum_is_ignored() -> None:
    assert parse(b'process_cpu_seconds_total{a="%d"} 1.7e308\n' * 2 % (1, 2)) is None


@pytest.mark.parametrize(
    "labels",
    [
        'type="tso"',
        ' type = "tso" , ',
        'a="b",type="tso",c=""',
        r'a="\"}\\",type="tso"',
        'a="{type=\\"x\\"}",type="tso"',
        'a="\u00e4, 7} 8",type="tso"',
    ],
)
def test_labels_may_have_any_value_and_order(labels: str) -> None:
    sample = parse(f"pd_client_cmd_handle_cmds_duration_seconds_count{{{labels}}} 4\n".encode())
    assert sample is not None
    assert sample.pd_requests == 4


@pytest.mark.parametrize(
    "line",
    [
        " 4",
        "{} 4",
        '{type="tso_async_wait"} 4',
        '{type="TSO"} 4',
        r'{a="type=\"tso\""} 4',
        r'{a="\",type=\"tso"} 4',
        '{mytype="tso"} 4',
        '{type="tso" 4',
        '{type="tso"}',
        '{type="tso"}}4',
        "{type=tso} 4",
        '{type="tso} 4',
    ],
)
def test_series_without_the_required_label_is_ignored(line: str) -> None:
    assert parse(f"pd_client_cmd_handle_cmds_duration_seconds_count{line}\n".encode()) is None


def test_incomplete_last_line_is_ignored() -> None:
    assert parse(b"tidb_server_maxprocs 16\nprocess_cpu_seconds_total 123") == CounterSample(
        7.0, cpu_quota=16.0
    )


def test_overlong_line_is_skipped() -> None:
    overlong = b'process_cpu_seconds_total{a="%b"} 1\n' % (b"x" * 70_000)
    assert parse(overlong, b"tidb_server_maxprocs 16\n") == CounterSample(7.0, cpu_quota=16.0)


SERIES_NAMES = st.sampled_from([series.name.encode() for series in TIDB_SERIES])


@given(
    st.lists(
        st.one_of(st.binary(), SERIES_NAMES, st.sampled_from([b"\n", b"{", b'type="tso"', b"} ", b" 1e9"]))
    )
)
def test_malformed_input_gives_only_valid_numbers(parts: list[bytes]) -> None:
    sample = parse(*parts)
    if sample is not None:
        values = [getattr(sample, series.field) for series in TIDB_SERIES]
        assert all(value is None or (math.isfinite(value) and value >= 0) for value in values)


@pytest.mark.parametrize("rest", [b'{a="b"' + b" " * 60_000, b" " + b"1" * 60_000, b" " * 60_000])
def test_long_invalid_line_is_parsed_fast(rest: bytes) -> None:
    """With backtracking, the regular expression would take minutes for such a line."""
    assert parse(b"tidb_server_maxprocs" + rest + b"x\n", RESPONSE) == EXPECTED


def test_one_megabyte_is_parsed_fast() -> None:
    """The time is linear in the size, even for a label set without a closing brace."""
    endless_labels = b"process_cpu_seconds_total{" + b'a="\\\\",' * 8000 + b"\n"
    assert parse(endless_labels * 20, RESPONSE) == EXPECTED

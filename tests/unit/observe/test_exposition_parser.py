"""The series that are picked out of an answer of `GET /metrics`."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.node_metrics import CounterSample
from controlplane.observe.node_metrics.exposition_parser import TIDB_SERIES, ExpositionParser

ANSWER = b"""\
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
FOUND = CounterSample(7.0, 1234.5, 16.0, 1073741824.0, 0.0, 100.0, 3.0, 42.0, 5.0)


def read(*parts: bytes) -> CounterSample | None:
    text = ExpositionParser()
    for part in parts:
        text.feed(part)
    return text.sample(7.0)


def cpu(value: str) -> float | None:
    found = read(f"process_cpu_seconds_total {value}\n".encode())
    return found.cpu_seconds if found is not None else None


def test_what_is_used_is_found_and_added_up_over_labels() -> None:
    assert read(ANSWER) == FOUND


@given(st.lists(st.integers(0, len(ANSWER)), max_size=20).map(sorted))
def test_it_may_come_in_any_parts(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(ANSWER)]
    assert read(*(ANSWER[a:b] for a, b in itertools.pairwise(bounds))) == FOUND


@pytest.mark.parametrize(
    ("value", "read_as"),
    [
        ("12", 12.0),
        ("+1.5e3", 1500.0),
        (".5", 0.5),
        ("1.7976931348623157e+308", 1.7976931348623157e308),
        ("3 1767225600123", 3.0),
        ("3\t-1 ", 3.0),
        ("3\r", 3.0),
        *(
            (text, None)
            for text in ("NaN", "+Inf", "-Inf", "1e999", "-1", "1_000", "0x10", "", "3 4 5", "3x")
        ),
    ],
)
def test_a_value_is_a_plain_number_or_not_there(value: str, read_as: float | None) -> None:
    assert cpu(value) == read_as


def test_a_value_that_is_no_number_spoils_no_other() -> None:
    found = read(b'tidb_tikvclient_request_seconds_count{type="a"} NaN\n' + ANSWER)
    assert found == FOUND


def test_a_sum_that_is_too_large_for_a_number_is_not_there() -> None:
    assert read(b'process_cpu_seconds_total{a="%d"} 1.7e308\n' * 2 % (1, 2)) is None


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
def test_labels_may_hold_anything_and_stand_in_any_order(labels: str) -> None:
    found = read(f"pd_client_cmd_handle_cmds_duration_seconds_count{{{labels}}} 4\n".encode())
    assert found is not None
    assert found.pd_requests == 4


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
def test_a_series_without_the_label_or_of_another_form_is_not_there(line: str) -> None:
    assert read(f"pd_client_cmd_handle_cmds_duration_seconds_count{line}\n".encode()) is None


def test_a_line_that_is_cut_off_is_not_there() -> None:
    assert read(b"tidb_server_maxprocs 16\nprocess_cpu_seconds_total 123") == CounterSample(
        7.0, cpu_quota=16.0
    )


def test_an_endless_line_takes_no_memory_and_hides_no_other() -> None:
    text = ExpositionParser()
    for _ in range(100):
        text.feed(b"x" * 50_000)
        assert len(text._partial_line) <= 64 * 1024
    text.feed(b"process_cpu_seconds_total 1\n")  # still the same line
    text.feed(b"tidb_server_maxprocs 16\n")
    assert text.sample(7.0) == CounterSample(7.0, cpu_quota=16.0)


BEGINNINGS = st.sampled_from([series.name.encode() for series in TIDB_SERIES])


@given(
    st.lists(
        st.one_of(st.binary(), BEGINNINGS, st.sampled_from([b"\n", b"{", b'type="tso"', b"} ", b" 1e9"]))
    )
)
def test_garbage_is_borne_and_gives_numbers_only(parts: list[bytes]) -> None:
    found = read(*parts)
    if found is not None:
        values = [getattr(found, series.field) for series in TIDB_SERIES]
        assert all(value is None or (math.isfinite(value) and value >= 0) for value in values)


@pytest.mark.parametrize("rest", [b'{a="b"' + b" " * 60_000, b" " + b"1" * 60_000, b" " * 60_000])
def test_a_long_line_that_is_no_series_is_read_fast(rest: bytes) -> None:
    """Each would take minutes if what repeats in it were given back, part by part."""
    assert read(b"tidb_server_maxprocs" + rest + b"x\n", ANSWER) == FOUND


def test_a_megabyte_is_read_fast() -> None:
    """Linear in its size, whatever it holds: a label that never ends is no trap."""
    trap = b"process_cpu_seconds_total{" + b'a="\\\\",' * 8000 + b"\n"
    assert read(trap * 20, ANSWER) == FOUND

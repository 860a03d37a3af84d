"""Detection of the end of a response, for every form of response, with the bytes split anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    CURSOR_EXISTS,
    IN_TRANSACTION,
    MAX_PACKET_PAYLOAD,
    MORE_RESULTS,
    MySqlCommand,
    eof,
    err,
    frame,
    frames,
    ok,
    single_row_result,
)
from sandbox.tidb_sim.response_tracker import ResponseProgress, ResponseTracker

DEFINITION = single_row_result((("a", "x"),), AUTOCOMMIT, deprecate_eof=True)[1]
MORE = AUTOCOMMIT | MORE_RESULTS
IN_TXN = AUTOCOMMIT | IN_TRANSACTION
CURSOR = AUTOCOMMIT | CURSOR_EXISTS
ROW = b"\x01x"
ERR = err(1062, "Duplicate entry", "23000")
PREPARED = b"\x00\x01\0\0\0" + b"\x02\0" + b"\x01\0" + b"\0\0\0"

# name, command, DEPRECATE_EOF, payloads, result of the tracker, last status
SHAPES = [
    ("ok", MySqlCommand.QUERY, True, [ok(IN_TXN)], ResponseProgress.DONE, IN_TXN),
    ("error keeps the status", MySqlCommand.QUERY, True, [ERR], ResponseProgress.DONE, AUTOCOMMIT),
    (
        "rows",
        MySqlCommand.QUERY,
        True,
        [b"\x01", DEFINITION, ROW, ROW, ok(IN_TXN, 0xFE)],
        ResponseProgress.DONE,
        IN_TXN,
    ),
    (
        "rows with EOF",
        MySqlCommand.QUERY,
        False,
        [b"\x02", DEFINITION, DEFINITION, eof(AUTOCOMMIT), ROW, eof(IN_TXN)],
        ResponseProgress.DONE,
        IN_TXN,
    ),
    (
        "no rows",
        MySqlCommand.QUERY,
        False,
        [b"\x01", DEFINITION, eof(IN_TXN), eof(IN_TXN)],
        ResponseProgress.DONE,
        IN_TXN,
    ),
    (
        "error among rows",
        MySqlCommand.QUERY,
        True,
        [b"\x01", DEFINITION, ROW, ERR],
        ResponseProgress.DONE,
        AUTOCOMMIT,
    ),
    (
        "several results",
        MySqlCommand.QUERY,
        True,
        [ok(MORE), b"\x01", DEFINITION, ROW, ok(MORE, 0xFE), ok(IN_TXN)],
        ResponseProgress.DONE,
        IN_TXN,
    ),
    ("error after a result", MySqlCommand.QUERY, True, [ok(MORE), ERR], ResponseProgress.DONE, MORE),
    ("file requested", MySqlCommand.QUERY, True, [b"\xfb/tmp/x"], ResponseProgress.WANTS_FILE, AUTOCOMMIT),
    (
        "cursor with EOF",
        MySqlCommand.STMT_EXECUTE,
        False,
        [b"\x01", DEFINITION, eof(CURSOR)],
        ResponseProgress.DONE,
        CURSOR,
    ),
    (
        "cursor",
        MySqlCommand.STMT_EXECUTE,
        True,
        [b"\x01", DEFINITION, ok(CURSOR, 0xFE)],
        ResponseProgress.DONE,
        CURSOR,
    ),
    (
        "binary rows",
        MySqlCommand.STMT_EXECUTE,
        True,
        [b"\x01", DEFINITION, b"\0\0x", ok(2, 0xFE)],
        ResponseProgress.DONE,
        2,
    ),
    (
        "fetch",
        MySqlCommand.STMT_FETCH,
        False,
        [b"\0\0x", b"\0\0y", eof(CURSOR)],
        ResponseProgress.DONE,
        CURSOR,
    ),
    (
        "fields",
        MySqlCommand.FIELD_LIST,
        True,
        [DEFINITION, DEFINITION, ok(2, 0xFE)],
        ResponseProgress.DONE,
        2,
    ),
    (
        "prepared",
        MySqlCommand.STMT_PREPARE,
        True,
        [PREPARED, *[DEFINITION] * 3],
        ResponseProgress.DONE,
        AUTOCOMMIT,
    ),
    (
        "prepared with EOF",
        MySqlCommand.STMT_PREPARE,
        False,
        [PREPARED, DEFINITION, eof(2), DEFINITION, DEFINITION, eof(2)],
        ResponseProgress.DONE,
        AUTOCOMMIT,
    ),
    (
        "prepared without definitions",
        MySqlCommand.STMT_PREPARE,
        False,
        [b"\x00\x01\0\0\0\0\0\0\0\0\0\0"],
        ResponseProgress.DONE,
        AUTOCOMMIT,
    ),
    ("statistics", MySqlCommand.STATISTICS, True, [b"Uptime: 1"], ResponseProgress.DONE, AUTOCOMMIT),
    ("option set", MySqlCommand.SET_OPTION, False, [eof(IN_TXN)], ResponseProgress.DONE, IN_TXN),
    ("ping rejected", MySqlCommand.PING, True, [ERR], ResponseProgress.DONE, AUTOCOMMIT),
]


@pytest.mark.parametrize(
    ("command", "deprecate_eof", "payloads", "end", "status"),
    [shape[1:] for shape in SHAPES],
    ids=[shape[0] for shape in SHAPES],
)
@given(cuts=st.lists(st.integers(min_value=1, max_value=400), max_size=30))
def test_detects_end_in_any_chunks(
    command: MySqlCommand,
    deprecate_eof: bool,
    payloads: list[bytes],
    end: ResponseProgress,
    status: int,
    cuts: list[int],
) -> None:
    tracker = ResponseTracker(deprecate_eof=deprecate_eof)
    tracker.begin(command)
    data = frames(1, payloads)
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    chunks = [data[start:stop] for start, stop in pairwise(edges)]
    progress = [tracker.feed(chunk) for chunk in chunks]
    assert progress == [*[ResponseProgress.MORE] * (len(chunks) - 1), end]
    assert tracker.status == status
    assert tracker.sequence in {0, len(payloads)} or end is ResponseProgress.WANTS_FILE


@pytest.mark.parametrize("first", [0xFE, 0x03, 0xFF])
def test_row_over_16_mib_is_no_end(first: int) -> None:
    """The row's first packet may start with 0xfe. Its second packet may start with any byte, or be empty."""
    tracker = ResponseTracker(deprecate_eof=True)
    tracker.begin(MySqlCommand.QUERY)
    assert tracker.feed(frames(1, [b"\x01", DEFINITION])) is ResponseProgress.MORE
    row = b"\xfe" + bytes(MAX_PACKET_PAYLOAD - 1)
    assert tracker.feed(frame(3, row)) is ResponseProgress.MORE
    assert tracker.feed(frame(4, bytes((first,)) + b"rest")) is ResponseProgress.MORE
    assert tracker.feed(frame(5, row)) is ResponseProgress.MORE
    assert tracker.feed(frame(6, b"")) is ResponseProgress.MORE
    assert tracker.feed(frame(7, ok(IN_TXN, 0xFE))) is ResponseProgress.DONE
    assert tracker.status == IN_TXN


def test_tracks_response_after_file() -> None:
    tracker = ResponseTracker(deprecate_eof=True)
    tracker.begin(MySqlCommand.QUERY)
    assert tracker.feed(frame(1, b"\xfbfile")) is ResponseProgress.WANTS_FILE
    assert tracker.sequence == 1
    tracker.begin(MySqlCommand.QUERY)
    assert tracker.feed(frame(5, ok(IN_TXN))) is ResponseProgress.DONE
    assert tracker.status == IN_TXN

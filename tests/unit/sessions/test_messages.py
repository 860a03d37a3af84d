"""Which results of commands are valid, and how they are read."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.module_calls import InvalidModuleMessage, decode
from controlplane.sessions import commands_pb2
from controlplane.sessions.messages import MAX_SESSIONS_PER_ENVOY, read_result
from tests.support.controlplane.session_module import session, session_message
from tests.support.controlplane.statement_reports import INSTANCE


def test_result_is_read() -> None:
    digest = bytes(range(32))
    message = session_message(7, 5, 77, client="10.1.0.1:40000", digest=digest, text="select ?", moves=2)
    result = read_result(commands_pb2.Result(command=1, sessions=[message], total=9), "envoy-1", INSTANCE)
    expected = session(7, 5, 77, digest=digest.hex(), text="select ?", moves=2)
    assert (result.sessions, result.total, result.is_incomplete) == ((expected,), 9, False)
    login = commands_pb2.Session(state="login", milliseconds_in_state=1 << 63)
    (read,) = read_result(commands_pb2.Result(sessions=[login]), "envoy-1", INSTANCE).sessions
    assert read.logged_in_seconds is None
    assert 0 < read.seconds_in_state < 1e10


@pytest.mark.parametrize(
    "values",
    [
        *({"state": "x"}, {"state": ""}, {"text": "x" * 513}, {"digest": b"short"}),
        *({"user": "u" * 1025}, {"node": "\u00e4" * 513}),
    ],
)
def test_invalid_session(values: dict[str, Any]) -> None:
    message = commands_pb2.Result(sessions=[session_message(1, 2, **values)])
    with pytest.raises(InvalidModuleMessage):
        read_result(message, "envoy-1", INSTANCE)


def test_result_with_too_many_sessions_is_invalid() -> None:
    message = commands_pb2.Result(sessions=[session_message(1, 2)] * (MAX_SESSIONS_PER_ENVOY + 1))
    with pytest.raises(InvalidModuleMessage, match="more than"):
        read_result(message, "envoy-1", INSTANCE)


@pytest.mark.parametrize("instance", ["", "x", INSTANCE + "\n"])
def test_message_needs_the_id_of_a_process(instance: str) -> None:
    data = commands_pb2.PollRequest(instance=instance).SerializeToString()
    with pytest.raises(InvalidModuleMessage, match="instance"):
        decode(commands_pb2.PollRequest, data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_invalid(data: bytes) -> None:
    with suppress(InvalidModuleMessage):
        message = decode(commands_pb2.ReportRequest, data)
        for result in message.results:
            read_result(result, "envoy-1", message.instance)

"""Real TiDB sessions whose states are large: they move, or stay and their clients see nothing of it."""

from __future__ import annotations

from sandbox.stack import Stack
from tests.tidb.operating import drain, start_drain
from tests.tidb.sessions import Connection, Sessions, port_of, rows, value

_SECONDS = 60.0


def _fill(session: Connection, mebibytes: float) -> None:
    """Have user variables of that many MiB of states: they are exported in base64."""
    rows(session, f"set @large = repeat('x', {int(mebibytes * (1 << 20) * 3 / 4)})")


def _leave_behind(session: Connection) -> None:
    """What a client may ask of its last statements."""
    rows(session, "create table t (id int auto_increment primary key, a tinyint)")
    rows(session, "create sequence s")
    rows(session, "select nextval(s)")
    rows(session, "set @first = 1")
    rows(session, "prepare first from 'select ''first'''")
    rows(session, "insert into t (a) values (1), (2), (3)")
    rows(session, "select * from t limit 2")
    # Two rows, and a warning for each.
    rows(session, "insert ignore into t (a) values (1000), (2000)")


def _asked(session: Connection) -> list[object]:
    """Each question changes what the next one would see, but not the others."""
    warnings = [row[:2] for row in rows(session, "show warnings")]
    return [warnings, value(session, "select last_insert_id()"), value(session, "select lastval(s)")]


async def _failed(stack: Stack, address: str) -> dict[str, int]:
    """Why sessions have stayed on that node."""
    answer = (await stack.api.get(f"/v1/nodes/{address}")).json()
    failed: dict[str, int] = answer["departure"]["failed"]
    return failed


async def test_a_session_with_too_large_states_stays_and_its_client_sees_nothing(
    stack: Stack, sessions: Sessions, database: str
) -> None:
    (node, *_) = stack.tidb
    control = sessions.direct(node)
    rows(control, f"create database {database}_control")
    rows(control, f"use {database}_control")
    every = {question: sessions.on(node) for question in ("select row_count()", "select found_rows()", "")}
    for number, session in enumerate([control, *every.values()]):
        if number:
            rows(session, f"create database {database}_{number}")
            rows(session, f"use {database}_{number}")
            _fill(session, 5)
        _leave_behind(session)
    await start_drain(stack, node)

    async def have_stayed() -> bool:
        return (await _failed(stack, node.address)).get("states_too_large", 0) == len(every)

    await stack.wait_until(have_stayed, "the sessions stay for their states", _SECONDS)
    expected = {
        "select row_count()": 2,
        "select found_rows()": value(_again(sessions.direct(node), f"{database}_f"), "select found_rows()"),
    }
    for question, session in every.items():
        if question:
            assert value(session, question) == expected[question], question
    assert _asked(every[""]) == _asked(control)
    for session in every.values():
        assert port_of(session) == node.port
        # A statement that is prepared now gets a number of its own.
        rows(session, "prepare second from 'select ''second'''")
        assert value(session, "execute first") == "first"
        assert value(session, "execute second") == "second"
    # They were asked once, not again and again.
    assert await _failed(stack, node.address) == {"states_too_large": len(every)}


def _again(session: Connection, database: str) -> Connection:
    """The same in a database of its own."""
    rows(session, f"create database {database}")
    rows(session, f"use {database}")
    _leave_behind(session)
    return session


async def test_a_session_with_large_states_moves(stack: Stack, sessions: Sessions) -> None:
    (node, *_) = stack.tidb
    session = sessions.on(node)
    _fill(session, 3)
    digest = value(session, "select md5(@large)")
    await drain(stack, node, _SECONDS)
    assert port_of(session) != node.port
    assert value(session, "select md5(@large)") == digest

"""Sessions with large states: they migrate, or they stay and their clients notice no change."""

from __future__ import annotations

from sandbox.local_cluster import LocalCluster
from tests.support.tidb.node_operations import drain, start_drain
from tests.support.tidb.sessions import Connection, TrackedSessions, query_rows, query_value, session_port

_TIMEOUT_SECONDS = 60.0


def _fill(session: Connection, mebibytes: float) -> None:
    """Set a user variable that takes this many MiB in the exported states, which encode it in base64."""
    query_rows(session, f"set @large = repeat('x', {int(mebibytes * (1 << 20) * 3 / 4)})")


def _run_statements(session: Connection) -> None:
    """Execute statements whose results a client can query later."""
    query_rows(session, "create table t (id int auto_increment primary key, a tinyint)")
    query_rows(session, "create sequence s")
    query_rows(session, "select nextval(s)")
    query_rows(session, "set @first = 1")
    query_rows(session, "prepare first from 'select ''first'''")
    query_rows(session, "insert into t (a) values (1), (2), (3)")
    query_rows(session, "select * from t limit 2")
    # Two rows, with one warning each.
    query_rows(session, "insert ignore into t (a) values (1000), (2000)")


def _read_results(session: Connection) -> list[object]:
    """Query the results of `_run_statements`, without those that a query changes."""
    warnings = [row[:2] for row in query_rows(session, "show warnings")]
    return [
        warnings,
        query_value(session, "select last_insert_id()"),
        query_value(session, "select lastval(s)"),
    ]


async def _failed_migrations(stack: LocalCluster, address: str) -> dict[str, int]:
    """Return how many migrations away from this node have failed, by reason."""
    answer = (await stack.api.get(f"/v1/nodes/{address}")).json()
    by_reason: dict[str, int] = answer["drain_progress"]["failed"]
    return by_reason


async def test_session_with_too_large_states_stays_unchanged(
    stack: LocalCluster, sessions: TrackedSessions, database: str
) -> None:
    (node, *_) = stack.tidb
    references = [sessions.direct(node) for _ in range(2)]
    large = [sessions.on_node(node) for _ in range(3)]
    for number, session in enumerate([*references, *large]):
        query_rows(session, f"create database {database}_{number}")
        query_rows(session, f"use {database}_{number}")
        if session in large:
            _fill(session, 5)
        _run_statements(session)
    await start_drain(stack, node)

    async def have_stayed() -> bool:
        return (await _failed_migrations(stack, node.address)).get("states_too_large", 0) == len(large)

    await stack.wait_until(have_stayed, "the sessions to stay because of their states", _TIMEOUT_SECONDS)
    # Any query changes ROW_COUNT() and FOUND_ROWS(), so each of the two is read in its own session.
    assert query_value(large[0], "select row_count()") == 2
    assert query_value(large[1], "select found_rows()") == query_value(references[0], "select found_rows()")
    assert _read_results(large[2]) == _read_results(references[1])
    for session in large:
        assert session_port(session) == node.port
        # A newly prepared statement does not replace `first`.
        query_rows(session, "prepare second from 'select ''second'''")
        assert query_value(session, "execute first") == "first"
        assert query_value(session, "execute second") == "second"
    # Each session was exported only once.
    assert await _failed_migrations(stack, node.address) == {"states_too_large": len(large)}


async def test_session_with_large_states_migrates(stack: LocalCluster, sessions: TrackedSessions) -> None:
    (node, *_) = stack.tidb
    session = sessions.on_node(node)
    _fill(session, 3)
    digest = query_value(session, "select md5(@large)")
    await drain(stack, node, _TIMEOUT_SECONDS)
    assert session_port(session) != node.port
    assert query_value(session, "select md5(@large)") == digest

"""A TiDB server passes the other checks, but runs no statements. Only the statement check finds it.

The server has `token-limit = 1`, so one session at a time runs a statement, and one session sleeps. All other
sessions wait, also for the statements of a login and of a migration.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.node_operations import migration_counts, start_drain, wait_for_state
from tests.support.tidb.sessions import (
    TrackedSessions,
    connect,
    connect_directly,
    query_rows,
    query_value,
    session_port,
)
from tests.support.waiting import assert_never, wait_until
from tests.tidb.conftest import STACK_SETTINGS

CHECK = {"enabled": True, "user": "root", "interval": 1.0, "timeout": 1.0}
DETECTION_SECONDS = 10.0
"""`fall` is 3, so detection takes 3 to 4 s; the rest is for a busy machine."""
UNDETECTED_SECONDS = 6.0
RECOVERY_SECONDS = 60.0
"""A hanging node is probed every 30 s, and must pass twice."""
LOGINS = 30
_IDLE_SESSIONS = 5
_NO_ANSWER_SECONDS, _LOGIN_SECONDS = 3, 15
"""How long clients wait for an answer of a hanging server, or of any other one."""
_JOIN_SECONDS = 10.0


@pytest.fixture
async def node(cluster: TidbCluster) -> Tidb:
    """Return a server that runs one statement at a time."""
    limited = cluster.tidb[-1]
    limited.arguments = ("--token-limit=1",)
    await limited.restart()
    return limited


@asynccontextmanager
async def no_token(node: Tidb, other: Tidb) -> AsyncIterator[None]:
    """Let a session of the node sleep until the end of the block."""
    statements = "select instance, id, info from information_schema.cluster_processlist"
    running = f"select count(*) from ({statements}) as p where info = 'select sleep(1000)'"
    with connect_directly(other) as remote, connect_directly(node, read_timeout=None) as sleeper:
        connection_id = query_value(sleeper, "select connection_id()")

        errors: list[pymysql.MySQLError] = []

        def sleep() -> None:
            try:
                sleeper.query("select sleep(1000)")
            except pymysql.MySQLError as error:
                errors.append(error)

        thread = threading.Thread(target=sleep, daemon=True)
        thread.start()
        try:
            try:
                await wait_until(lambda: query_value(remote, running) == 1)
            except TimeoutError:
                pytest.fail(
                    f"session {connection_id} does not sleep: {errors}, {query_rows(remote, statements)}"
                )
            yield
        finally:
            # The node itself would not run this statement.
            remote.query(f"kill {connection_id}")
            await asyncio.to_thread(thread.join, _JOIN_SECONDS)
        assert not thread.is_alive()


async def login_results(stack: LocalCluster, timeout_seconds: int) -> Counter[str]:
    """Log in through Envoy, and return the ports of the sessions' nodes, or the clients' errors."""

    def log_in() -> str:
        try:
            with connect(stack.sql_port, read_timeout=timeout_seconds) as session:
                return str(session_port(session))
        except pymysql.MySQLError as error:
            return str(error.args[0])

    return Counter(await asyncio.gather(*(asyncio.to_thread(log_in) for _ in range(LOGINS))))


# `node` restarts before `stack` starts. Otherwise it would get few sessions at first (`balance.slow_start`).
async def test_other_checks_do_not_find_it(
    node: Tidb, stack: LocalCluster, sessions: TrackedSessions, cluster: TidbCluster
) -> None:
    await wait_for_state(stack, node, "active")
    # Otherwise the sleeping session alone would make the node the fullest one, and new sessions avoid it.
    for other in cluster.tidb[:-1]:
        for _ in range(_IDLE_SESSIONS):
            sessions.direct(other)

    async def is_inactive() -> bool:
        return (await stack.states())[node.address] != "active"

    async with no_token(node, cluster.tidb[0]):
        await assert_never(is_inactive, UNDETECTED_SECONDS)
        health = (await stack.nodes())[node.address]["health"]
        assert [health[check]["status"] for check in ("status", "sql")] == ["pass", "pass"]
        results = await login_results(stack, _NO_ANSWER_SECONDS)
    assert results["2013"] > 0, results
    print(
        f"\ndrill hanging_server: without the check, {results['2013']} of {LOGINS} new clients get no answer"
    )


async def test_statement_check_finds_it(
    tmp_path: Path, node: Tidb, cluster: TidbCluster, database: str
) -> None:
    settings: dict[str, Any] = {**STACK_SETTINGS, "health": {"statement": CHECK}}
    async with LocalCluster.start(tmp_path, cluster=cluster, settings=settings) as stack:
        with closing(TrackedSessions(stack, database)) as sessions:
            idle = [sessions.on_node(node) for _ in range(_IDLE_SESSIONS)]
            async with no_token(node, cluster.tidb[0]):
                started_at = time.monotonic()
                await wait_for_state(stack, node, "unhealthy", DETECTION_SECONDS)
                detected_after = time.monotonic() - started_at
                view = (await stack.nodes())[node.address]
                assert view["reason"].endswith("does not run a statement within 1 s")
                assert view["health"]["sql"]["status"] == view["health"]["status"]["status"] == "pass"

                results = await login_results(stack, _LOGIN_SECONDS)
                assert not results.keys() & {"2013", str(node.port)}, results
                assert sum(results.values()) == LOGINS

                # Its sessions stay: without a token, their states cannot be exported.
                await start_drain(stack, node)
                await assert_never(lambda: has_migrated(stack, node), 3)
                assert (await stack.nodes())[node.address]["sessions"] >= _IDLE_SESSIONS
                await undrain_unhealthy(stack, node)
            freed_at = time.monotonic()
            assert {session_port(session) for session in idle} == {node.port}
            await wait_for_state(stack, node, "active", RECOVERY_SECONDS)
            recovered_after = time.monotonic() - freed_at
        # The sessions of the probes that timed out have ended, too.
        with connect_directly(node) as root:
            count = "select count(*) from information_schema.processlist"
            await wait_until(lambda: query_value(root, count) <= 2)
        assert stack.violations() == []
        assert stack.bugs() == []
    print(
        f"\ndrill hanging_server: unhealthy after {detected_after:.1f} s, then {LOGINS} of {LOGINS} new"
        f" clients on other nodes; active {recovered_after:.1f} s after the end; {len(idle)} idle sessions"
        " kept"
    )


async def has_migrated(stack: LocalCluster, node: Tidb) -> bool:
    counts = await migration_counts(stack)
    return counts.get((node.address, "moved", "ok"), 0) > 0


async def undrain_unhealthy(stack: LocalCluster, node: Tidb) -> None:
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await wait_for_state(stack, node, "unhealthy")

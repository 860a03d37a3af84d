"""While a node has `max_connections` clients, and afterwards, the answers are the same as without Tidevoy."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import asyncmy
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.module.connection_limit import (
    BURST_LOGINS,
    CONNECTION_LIMIT,
    TOO_MANY_CONNECTIONS,
    LoginResults,
    log_in_repeatedly,
)
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.node_operations import drain, wait_until_can_log_in
from tests.support.tidb.sessions import connect_directly, query_value
from tests.support.waiting import wait_until
from tests.tidb.conftest import STACK_SETTINGS

TOO_MANY_CONNECTIONS_PACKET = b"\x17\x00\x00\x00\xff\x10\x04Too many connections"


def address(stack: LocalCluster) -> str:
    return f"127.0.0.1:{stack.sql_port}"


async def wait_no_sessions(node: Tidb) -> None:
    """Wait until the node lists no session of an earlier burst."""
    with connect_directly(node) as connection:
        await wait_until(
            lambda: query_value(connection, "select count(*) from information_schema.processlist") == 1
        )


async def run_burst(node: Tidb, target: str, *, at_once: int) -> LoginResults:
    await wait_no_sessions(node)
    results = await log_in_repeatedly(target, at_once=at_once)
    print(f"{target}, {at_once} at once: burst {dict(results.burst)}, later {dict(results.later)}")
    return results


async def test_single_full_node_answers_as_without_tidevoy(
    stack: LocalCluster, global_variables: GlobalVariables
) -> None:
    single, *others = stack.tidb
    for other in others:
        await drain(stack, other)
    global_variables.set("max_connections", CONNECTION_LIMIT, single)
    direct_address = f"127.0.0.1:{single.port}"
    for target in (direct_address, address(stack)):
        results = await run_burst(single, target, at_once=1)
        assert results.burst == Counter(
            {"ok": CONNECTION_LIMIT, TOO_MANY_CONNECTIONS: BURST_LOGINS - CONNECTION_LIMIT}
        )
        assert set(results.later) == {"ok"}
        assert results.packets == {TOO_MANY_CONNECTIONS_PACKET}
        # More logins may succeed in parallel, because TiDB counts a session only after its login.
        results = await run_burst(single, target, at_once=BURST_LOGINS)
        assert set(results.burst) == {"ok", TOO_MANY_CONNECTIONS}
        assert set(results.later) == {"ok"}
    await wait_no_sessions(single)
    assert all(not node["ejected_by"] for node in (await stack.nodes()).values())


@pytest.mark.parametrize("tls", ["disabled", "required"])
async def test_full_node_is_skipped_if_others_have_room(
    tmp_path: Path, cluster: TidbCluster, global_variables: GlobalVariables, tls: str
) -> None:
    """Envoy also skips a node that rejects a client after the greeting, which happens in a parallel burst."""
    full = cluster.tidb[0]
    settings = {"tls": {"backend": {"mode": tls, "verify": "none"}, "allow_cleartext_backend": True}}
    async with LocalCluster.start(tmp_path, cluster=cluster, settings=settings) as stack:
        global_variables.set("max_connections", 5, full)
        for at_once in (1, BURST_LOGINS):
            results = await run_burst(full, address(stack), at_once=at_once)
            assert results.burst == Counter({"ok": BURST_LOGINS})
            assert set(results.later) == {"ok"}
        await wait_no_sessions(full)
        assert stack.bugs() == []


async def test_password_is_checked_after_skipping_a_full_node(
    tmp_path: Path, cluster: TidbCluster, global_variables: GlobalVariables, database: str
) -> None:
    full = cluster.tidb[0]
    with connect_directly(full) as connection:
        connection.query(f"create user {database} identified with mysql_native_password by 'right'")
    await wait_until_can_log_in(cluster.tidb, database, "right")
    # Otherwise, a check could find the node full and take it out of service before the logins.
    settings = {**STACK_SETTINGS, "health": {"sql": {"interval": 60}}}

    async def log_in(port: int, password: str) -> str:
        options = {"host": "127.0.0.1", "port": port, "user": database, "password": password}
        try:
            connection = await asyncmy.connect(**options)
        except asyncmy.errors.OperationalError as error:
            return str(error.args[0])
        await connection.ensure_closed()
        return "ok"

    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        await wait_no_sessions(full)
        global_variables.set("max_connections", 1, full)
        # This connection takes the only place.
        with connect_directly(full):
            for password, expected in (("right", "ok"), ("wrong", "1045")):
                results = await asyncio.gather(*(log_in(stack.sql_port, password) for _ in range(30)))
                assert Counter(results) == {expected: 30}

        async def was_skipped() -> bool:
            page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
            series = re.findall(r"^envoy_tidevoy_connect_failures\S*", page, re.MULTILINE)
            return any('reason="full"' in line and full.address in line for line in series)

        await wait_until(was_skipped)

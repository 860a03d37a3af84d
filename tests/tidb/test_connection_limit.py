"""A node at its `max_connections`: clients receive the same as without Tidevoy, then and later."""

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

FULL_PACKET = b"\x17\x00\x00\x00\xff\x10\x04Too many connections"


def address(stack: LocalCluster) -> str:
    return f"127.0.0.1:{stack.sql_port}"


async def empty(node: Tidb) -> None:
    """Wait until the node lists no session of a burst any more."""
    with connect_directly(node) as connection:
        await wait_until(
            lambda: query_value(connection, "select count(*) from information_schema.processlist") == 1
        )


async def burst(node: Tidb, where: str, *, at_once: int) -> LoginResults:
    await empty(node)
    answers = await log_in_repeatedly(where, at_once=at_once)
    print(f"{where}, {at_once} at once: burst {dict(answers.burst)}, later {dict(answers.later)}")
    return answers


async def test_a_lone_full_node_answers_as_it_does_directly(
    stack: LocalCluster, global_variables: GlobalVariables
) -> None:
    lone, *others = stack.tidb
    for other in others:
        await drain(stack, other)
    global_variables.set("max_connections", CONNECTION_LIMIT, lone)
    own = f"127.0.0.1:{lone.port}"
    for where in (own, address(stack)):
        answers = await burst(lone, where, at_once=1)
        assert answers.burst == Counter(
            {"ok": CONNECTION_LIMIT, TOO_MANY_CONNECTIONS: BURST_LOGINS - CONNECTION_LIMIT}
        )
        assert set(answers.later) == {"ok"}
        assert answers.packets == {FULL_PACKET}
        # In parallel some more may succeed: TiDB counts a session from the end of its login.
        answers = await burst(lone, where, at_once=BURST_LOGINS)
        assert set(answers.burst) == {"ok", TOO_MANY_CONNECTIONS}
        assert set(answers.later) == {"ok"}
    await empty(lone)
    assert all(not node["ejected_by"] for node in (await stack.nodes()).values())


@pytest.mark.parametrize("tls", ["disabled", "required"])
async def test_of_three_nodes_the_full_one_is_passed_over(
    tmp_path: Path, cluster: TidbCluster, global_variables: GlobalVariables, tls: str
) -> None:
    """Also for clients that it refuses after its greeting, as most of a parallel burst."""
    full = cluster.tidb[0]
    settings = {"tls": {"backend": {"mode": tls, "verify": "none"}, "allow_cleartext_backend": True}}
    async with LocalCluster.start(tmp_path, cluster=cluster, settings=settings) as stack:
        global_variables.set("max_connections", 5, full)
        for at_once in (1, BURST_LOGINS):
            answers = await burst(full, address(stack), at_once=at_once)
            assert answers.burst == Counter({"ok": BURST_LOGINS})
            assert set(answers.later) == {"ok"}
        await empty(full)
        assert "a bug:" not in stack.envoy.process.output()


async def test_a_login_that_continues_at_another_node_checks_the_password_there(
    stack: LocalCluster, global_variables: GlobalVariables, database: str
) -> None:
    full = stack.tidb[0]
    with connect_directly(full) as connection:
        connection.query(f"create user {database} identified with mysql_native_password by 'right'")
    await wait_until_can_log_in(stack.tidb, database, "right")
    await empty(full)
    global_variables.set("max_connections", 1, full)

    async def log_in(password: str) -> str:
        options = {"host": "127.0.0.1", "port": stack.sql_port, "user": database, "password": password}
        try:
            connection = await asyncmy.connect(**options)
        except asyncmy.errors.OperationalError as error:
            return str(error.args[0])
        await connection.ensure_closed()
        return "ok"

    for password, expected in (("right", "ok"), ("wrong", "1045")):
        assert Counter(await asyncio.gather(*(log_in(password) for _ in range(30)))) == {expected: 30}

    async def was_passed_over() -> bool:
        page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
        found = re.findall(r"^envoy_tidevoy_connect_failures\S*", page, re.MULTILINE)
        return any('reason="full"' in each and full.address in each for each in found)

    await wait_until(was_passed_over)

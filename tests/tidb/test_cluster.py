"""Tidevoy in front of a real TiDB cluster: nodes are found, clients are served, sessions leave a node."""

from __future__ import annotations

from sandbox.local_cluster import Stack
from tests.support.tidb.node_operations import drain
from tests.support.tidb.sessions import Sessions, port_of, rows, value


async def test_nodes_are_found_in_pd(stack: Stack) -> None:
    nodes = await stack.nodes()
    assert set(nodes) == {node.address for node in stack.tidb}
    for node in stack.tidb:
        shown = nodes[node.address]
        assert (shown["state"], shown["source"]) == ("active", "pd")
        assert shown["status_address"] == node.status.removeprefix("http://")
        assert shown["version"]


async def test_a_drain_moves_an_idle_session_with_its_state(stack: Stack, sessions: Sessions) -> None:
    session = sessions.through()
    (before,) = [node for node in stack.tidb if node.port == port_of(session)]
    rows(session, "set @kept = 'as it was', sql_mode = 'ANSI_QUOTES'")
    rows(session, "prepare doubled from 'select ? * 2'")
    await drain(stack, before)
    assert port_of(session) != before.port
    assert value(session, "select @kept") == "as it was"
    assert value(session, "select @@sql_mode") == "ANSI_QUOTES"
    rows(session, "set @number = 21")
    assert value(session, "execute doubled using @number") == 42

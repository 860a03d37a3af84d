"""Tidevoy in front of a real TiDB cluster: nodes are found, clients are served, sessions leave a node."""

from __future__ import annotations

from sandbox.local_cluster import LocalCluster
from tests.support.tidb.node_operations import drain
from tests.support.tidb.sessions import TrackedSessions, query_rows, query_value, session_port


async def test_nodes_are_found_in_pd(stack: LocalCluster) -> None:
    nodes = await stack.nodes()
    assert set(nodes) == {node.address for node in stack.tidb}
    for node in stack.tidb:
        shown = nodes[node.address]
        assert (shown["state"], shown["source"]) == ("active", "pd")
        assert shown["status_address"] == node.status_url.removeprefix("http://")
        assert shown["version"]


async def test_a_drain_moves_an_idle_session_with_its_state(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    session = sessions.through_envoy()
    (before,) = [node for node in stack.tidb if node.port == session_port(session)]
    query_rows(session, "set @kept = 'as it was', sql_mode = 'ANSI_QUOTES'")
    query_rows(session, "prepare doubled from 'select ? * 2'")
    await drain(stack, before)
    assert session_port(session) != before.port
    assert query_value(session, "select @kept") == "as it was"
    assert query_value(session, "select @@sql_mode") == "ANSI_QUOTES"
    query_rows(session, "set @number = 21")
    assert query_value(session, "execute doubled using @number") == 42

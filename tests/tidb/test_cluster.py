"""Tidevoy in front of a real TiDB cluster: it discovers nodes, and a drain migrates sessions."""

from __future__ import annotations

from sandbox.local_cluster import LocalCluster
from tests.support.tidb.node_operations import drain
from tests.support.tidb.sessions import TrackedSessions, query_rows, query_value, session_port


async def test_nodes_are_discovered_in_pd(stack: LocalCluster) -> None:
    # A server that another test has added and stopped is still registered in PD.
    nodes = {address: node for address, node in (await stack.nodes()).items() if node["state"] == "active"}
    assert set(nodes) == {node.address for node in stack.tidb}
    for node in stack.tidb:
        node_view = nodes[node.address]
        assert node_view["source"] == "pd"
        assert node_view["status_address"] == node.status_url.removeprefix("http://")
        assert node_view["version"]


async def test_drain_migrates_an_idle_session_with_its_state(
    stack: LocalCluster, sessions: TrackedSessions
) -> None:
    session = sessions.through_envoy()
    (source,) = [node for node in stack.tidb if node.port == session_port(session)]
    query_rows(session, "set @kept = 'unchanged', sql_mode = 'ANSI_QUOTES'")
    query_rows(session, "prepare doubled from 'select ? * 2'")
    await drain(stack, source)
    assert session_port(session) != source.port
    assert query_value(session, "select @kept") == "unchanged"
    assert query_value(session, "select @@sql_mode") == "ANSI_QUOTES"
    query_rows(session, "set @number = 21")
    assert query_value(session, "execute doubled using @number") == 42

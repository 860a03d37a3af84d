"""A cluster behind HAProxy moves to Tidevoy and back, as docs/migrate/from-haproxy.md describes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.tidb_cluster import TidbCluster
from tests.support.e2e.haproxy import BalancedServer
from tests.support.tidb.client_balancer import ClientBalancer, drain_used_node, has_sessions, import_settings
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.sessions import connect
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


async def test_clients_do_not_notice_the_move_and_the_way_back(
    tmp_path: Path, cluster: TidbCluster, database: str, ports: Ports
) -> None:
    servers = [BalancedServer(f"tidb-{number}", node.address) for number, node in enumerate(cluster.tidb, 1)]
    haproxy = ClientBalancer(tmp_path / "haproxy", ports, servers, "check inter 2s rise 2 fall 3")
    tidb = [server.name for server in servers]
    async with haproxy, DrillLoad(haproxy.sql_port, database) as old_sessions:
        settings = await import_settings("import-haproxy", haproxy.config_file)
        assert {node["address"] for node in settings["nodes"]} == {node.address for node in cluster.tidb}
        # The new load balancer runs beside the old one, on a port of its own.
        del settings["sql"]["listen"]
        async with LocalCluster.start(tmp_path / "tidevoy", cluster=cluster, settings=settings) as stack:
            short = DrillLoad(haproxy.sql_port, database, clients=4, statement="select {client}")
            await haproxy.add_server("tidevoy", stack.sql_port)
            await haproxy.set_state("drain", *tidb)
            async with short:
                await wait_until(lambda: has_sessions(stack, 4))
                assert await haproxy.count_sessions("tidevoy") == 4
                await old_sessions.wait_for_statements()
                # A node is drained: the sessions through Tidevoy move, and those through HAProxy cannot.
                await drain_used_node(stack)
                await short.wait_for_statements()
                # Back: new sessions go to the servers again, and those through Tidevoy end by themselves.
                await haproxy.set_state("ready", *tidb)
                await haproxy.set_state("drain", "tidevoy")
                with connect(haproxy.sql_port, database):
                    assert await haproxy.count_sessions("tidevoy") == 4
                await short.wait_for_statements()
                await old_sessions.wait_for_statements()
            await wait_until(lambda: has_sessions(stack, 0))
    print(
        f"\nmove from HAProxy and back: {old_sessions.statements + short.statements} statements,"
        f" {len(old_sessions.errors) + len(short.errors)} errors"
    )
    assert (old_sessions.errors, short.errors) == ([], [])

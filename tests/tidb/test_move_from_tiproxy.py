"""A cluster behind TiProxy moves to Tidevoy and back, as docs/migrate/from-tiproxy.md describes it.

HAProxy stands for the load balancer in front of TiProxy. The program `tiproxy` must be in the folder of the
TiDB programs, or on the PATH.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.tidb_cluster import TidbCluster
from tests.support.e2e.haproxy import BalancedServer
from tests.support.tidb.client_balancer import ClientBalancer, drain_used_node, has_sessions, import_settings
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.sessions import connect
from tests.support.tidb.tiproxy import TiProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


async def test_clients_do_not_notice_the_move_and_the_way_back(
    tmp_path: Path, cluster: TidbCluster, database: str, ports: Ports, tiproxy_program: str
) -> None:
    pd = cluster.pd.url.removeprefix("http://")
    tiproxy = TiProxy(tiproxy_program, tmp_path / "tiproxy", ports, pd)
    servers = [BalancedServer("tiproxy", f"127.0.0.1:{tiproxy.sql_port}")]
    balancer = ClientBalancer(tmp_path / "balancer", ports, servers)
    async with tiproxy, balancer:
        settings = await import_settings("import-tiproxy", tiproxy.config_file)
        assert settings["pd"]["urls"] == [f"http://{pd}"]
        assert settings["sql"]["max_connections"] == 1000
        # Tidevoy runs beside TiProxy, on ports of its own.
        del settings["sql"]["listen"], settings["api"]
        old_sessions = DrillLoad(balancer.sql_port, database)
        new_sessions = DrillLoad(balancer.sql_port, database, clients=4, statement="select {client}")
        async with (
            LocalCluster.start(tmp_path / "tidevoy", cluster=cluster, settings=settings) as stack,
            AsyncExitStack() as clients,
        ):
            async with old_sessions:
                await balancer.add_server("envoy", stack.sql_port)
                await balancer.set_state("drain", "tiproxy")
                await clients.enter_async_context(new_sessions)
                await wait_until(lambda: has_sessions(stack, 4))
                # A node is drained: its sessions through Tidevoy move, and those through TiProxy stay.
                await drain_used_node(stack)
                await new_sessions.wait_for_statements()
                await old_sessions.wait_for_statements()
            # The sessions through TiProxy have ended: it is stopped.
            await wait_until(lambda: balancer.has_sessions("tiproxy", 0))
            assert await tiproxy.terminate() == 0
            await new_sessions.wait_for_statements()
            # Back: new sessions go to TiProxy again, and those through Tidevoy end by themselves.
            await tiproxy.launch()
            await balancer.set_state("ready", "tiproxy")
            await balancer.set_state("drain", "envoy")
            with connect(balancer.sql_port, database):
                assert await balancer.count_sessions("tiproxy") == 1
            await new_sessions.wait_for_statements()
            await clients.aclose()
            await wait_until(lambda: has_sessions(stack, 0))
    print(
        f"\nmove from TiProxy and back: {old_sessions.statements + new_sessions.statements} statements,"
        f" {len(old_sessions.errors) + len(new_sessions.errors)} errors"
    )
    assert (old_sessions.errors, new_sessions.errors) == ([], [])

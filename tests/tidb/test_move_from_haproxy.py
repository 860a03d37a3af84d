"""A cluster behind HAProxy moves to Tidevoy and back, as docs/migrate/from-haproxy.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.server import sends_mysql_greeting
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.haproxy import HaProxy
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.sessions import connect
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


class HaProxyOfTidb(HaProxy):
    """HAProxy in front of TiDB servers."""

    def __init__(self, directory: Path, ports: Ports, servers: list[Tidb]) -> None:
        super().__init__(directory, ports)
        self._servers = servers

    def proxies(self) -> str:
        servers = "".join(
            f"    server tidb-{number} {server.address} check inter 2s rise 2 fall 3\n"
            for number, server in enumerate(self._servers, 1)
        )
        return f"listen tidb\n    bind 127.0.0.1:{self.sql_port}\n    balance leastconn\n{servers}"

    async def is_serving(self) -> bool:
        return await sends_mysql_greeting(self.sql_port)

    async def count_sessions(self, server: str) -> int:
        return int((await self.servers_of("tidb"))[server]["scur"])

    async def set_state(self, state: str, *servers: str) -> None:
        for server in servers:
            assert await self.run_command(f"set server tidb/{server} state {state}") == ""


async def import_settings(configuration: Path) -> dict[str, Any]:
    """Return the settings that `tidevoy import-haproxy` prints."""
    result = await run_tidevoy("http://127.0.0.1:1", "import-haproxy", str(configuration))
    assert result.exit_code == 0, result.stderr
    settings: dict[str, Any] = yaml.safe_load(result.stdout)
    return settings


async def test_clients_do_not_notice_the_move_and_the_way_back(
    tmp_path: Path, cluster: TidbCluster, database: str, ports: Ports
) -> None:
    haproxy = HaProxyOfTidb(tmp_path / "haproxy", ports, cluster.tidb)
    tidb = [f"tidb-{number}" for number in range(1, len(cluster.tidb) + 1)]
    async with haproxy, DrillLoad(haproxy.sql_port, database) as old_sessions:
        settings = await import_settings(haproxy.config_file)
        assert {node["address"] for node in settings["nodes"]} == {node.address for node in cluster.tidb}
        # The new load balancer runs beside the old one, on a port of its own.
        del settings["sql"]["listen"]
        async with LocalCluster.start(tmp_path / "tidevoy", cluster=cluster, settings=settings) as stack:
            short = DrillLoad(haproxy.sql_port, database, clients=4, statement="select {client}")
            added = await haproxy.run_command(f"add server tidb/tidevoy 127.0.0.1:{stack.sql_port} check")
            assert "New server registered" in added
            assert await haproxy.run_command("enable health tidb/tidevoy") == ""
            await haproxy.set_state("ready", "tidevoy")
            await haproxy.set_state("drain", *tidb)
            async with short:
                await wait_until(lambda: has_sessions(stack, 4))
                assert await haproxy.count_sessions("tidevoy") == 4
                await old_sessions.wait_for_statements()
                # A node is drained: the sessions through Tidevoy move, and those through HAProxy cannot.
                address = cluster.tidb[0].address
                (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()
                await wait_until(lambda: is_drained_of(stack, address))
                await short.wait_for_statements()
                (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
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


async def has_sessions(stack: LocalCluster, count: int) -> bool:
    return sum(node["sessions"] or 0 for node in (await stack.nodes()).values()) == count


async def is_drained_of(stack: LocalCluster, address: str) -> bool:
    return not (await stack.nodes())[address]["sessions"]

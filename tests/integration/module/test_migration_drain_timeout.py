"""When a drain times out, the module ends the sessions that could not migrate."""

from __future__ import annotations

from pathlib import Path

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.migration.fleet import run_fleet
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import connect_logged_in, read_to_end, with_timeout
from tests.support.tidb_sim_clients import error_code


async def test_session_ends_with_1053_when_the_drain_times_out(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing, ModuleConfig()) as fleet:
        client = await connect_logged_in(fleet.proxy)
        await client.query("begin")
        await client.rows("select 1")
        current = next(node for node in fleet.nodes if node.node.connections)
        hosts = [Host(node.sql_address) for node in fleet.nodes if node is not current]
        publish_nodes(
            fleet.endpoints, [*hosts, Host(current.sql_address, state="draining", terminate_sessions=True)]
        )
        sequence, packet = await with_timeout(client.read_packet())
        assert (sequence, error_code(packet)) == (1, 1053)
        assert await read_to_end(client) == b""

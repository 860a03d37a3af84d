"""The end of a drain's time."""

from __future__ import annotations

from pathlib import Path

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.migration.fleet import fleet
from tests.support.module.bootstrap import Host, Parts, tell
from tests.support.module.envoy import logged_in, rest, within
from tests.support.tidb_sim_clients import code


async def test_whoever_is_left_when_the_time_is_over_is_told(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with fleet(tmp_path, mariadb, signing, Parts()) as all_:
        client = await logged_in(all_.proxy)
        await client.query("begin")
        await client.rows("select 1")
        on = next(node for node in all_.nodes if node.node.connections)
        hosts = [Host(node.sql_address) for node in all_.nodes if node is not on]
        tell(all_.endpoints, [*hosts, Host(on.sql_address, state="draining", close=True)])
        sequence, packet = await within(client.packet())
        assert (sequence, code(packet)) == (1, 1053)
        assert await rest(client) == b""

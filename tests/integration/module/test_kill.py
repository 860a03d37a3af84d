"""A KILL ends an idle session whose states Envoy has saved, but a crash of the session's node does not.

Envoy saves the states that it exported for a migration that then failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MigrationRules
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.migration.fault_envoy import to_host
from tests.support.migration.fleet import NodeSpec, run_fleet
from tests.support.migration.scripted_node import CHECK_STATEMENT, ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import deny_logins, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs_migration

MANY = 32
MAX_PROBES = 4
"""If many sessions end, Envoy opens at most this many connections to check whether their node listens."""


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("with_proxy_header", [False, True], ids=["", "PROXY"])
async def test_killed_sessions_end_and_others_survive_a_node_crash(
    tmp_path: Path, mariadb: MariaDb, with_tls: bool, with_proxy_header: bool
) -> None:
    """`with_proxy_header`: the nodes require a PROXY header, and send no greeting without it."""
    specs = [
        NodeSpec(requires_proxy_header=with_proxy_header),
        NodeSpec(MigrationRules(rejects_set_states=True), requires_proxy_header=with_proxy_header),
        NodeSpec(requires_proxy_header=with_proxy_header),
    ]
    tls = PemFiles.create(tmp_path / "certificates") if with_tls else None
    config = ModuleConfig(node={"proxy_protocol": "v2"} if with_proxy_header else {})
    async with run_fleet(tmp_path, mariadb, config=config, specs=specs, drained=[1, 2], tls=tls) as nodes:
        first, rejecting, third = nodes.nodes
        clients = [await nodes.connect_answer_client() for _ in range(8)]
        for number, client in enumerate(clients):
            await client.query(f"set @mine = {number}")
        connection_ids = [(await client.query_row("select connection_id()"))[0] for client in clients]
        nodes.drain(first, third)
        await nodes.wait_stayed("not_restored", len(clients))
        async with nodes.proxy.wait_applied():
            nodes.drain(rejecting)
        await nodes.wait_session_counts(8, 0, 0)
        async with _admin(mariadb) as admin:
            for connection_id in connection_ids[:4]:
                await admin.query(b"kill " + (connection_id or b""))
        for client in clients[:4]:
            assert await with_timeout(client.reader.read()) == b""
        assert nodes.sessions == [4, 0, 0]
        first.crash()
        await wait_until(lambda: third.node.connections == 4)
        for number, client in enumerate(clients[4:], 4):
            assert await client.query_row("select @mine") == (str(number).encode(),)


@asynccontextmanager
async def _admin(mariadb: MariaDb) -> AsyncIterator[RawClient]:
    """Connect to MariaDB. Its KILL also ends sessions of simulated servers, which use MariaDB's ids."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mariadb.port)
    try:
        admin = RawClient(reader, writer)
        assert (await admin.login())[0] == 0
        yield admin
    finally:
        writer.close()


@asynccontextmanager
async def run_with_saved_states(
    directory: Path,
) -> AsyncIterator[tuple[ScriptedNode, ScriptedNode, list[RawClient]]]:
    """Run a node with sessions whose states Envoy has saved, and another node that accepts these states."""
    endpoints = directory / "endpoints.json"
    old, other = ScriptedNode("old"), ScriptedNode("other")
    config = ModuleConfig(endpoints=endpoints)
    async with (
        old.listening(),
        other.listening(),
        run_fake_server(deny_logins) as denying,
        run_envoy(directory, [Host("127.0.0.1:1")], config) as proxy,
    ):
        async with proxy.wait_applied():
            publish_nodes(endpoints, [to_host(old)])
        clients = [await proxy.connect() for _ in range(MANY)]
        for client in clients:
            assert (await with_timeout(client.login()))[0] == 0
            assert (await client.query("set @a = 7"))[0] == 0
        denying_host = Host(denying.endpoint, "denying")
        publish_nodes(endpoints, [Host(old.endpoint, old.name, state="draining"), denying_host])
        await wait_until(lambda: all(connection.has_exported for connection in old.connections))
        # Envoy tries denied sessions again after a second. End this before the other node can be used.
        async with proxy.wait_applied():
            publish_nodes(endpoints, [to_host(old), denying_host])
        await wait_until(lambda: denying.connections == denying.connection_ends.qsize() >= MANY)
        async with proxy.wait_applied():
            publish_nodes(endpoints, [to_host(old), to_host(other)])
        yield old, other, clients


async def test_sessions_that_end_together_share_a_few_probes(tmp_path: Path) -> None:
    async with run_with_saved_states(tmp_path) as (old, _, clients):
        connections = list(old.connections)
        await asyncio.gather(*(link.send_fin() for link in connections[:MANY]))
        for client in clients:
            assert await with_timeout(client.reader.read()) == b""
        assert 1 <= len(old.connections) - len(connections) <= MAX_PROBES


async def test_sessions_that_are_reset_together_are_restored(tmp_path: Path) -> None:
    """Envoy does not assume a KILL, although the node listens: a KILL never resets several connections."""
    async with run_with_saved_states(tmp_path) as (old, other, clients):
        await asyncio.gather(*(link.reset() for link in old.connections[:MANY]))
        await wait_until(lambda: len(other.connections) == MANY)
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK_STATEMENT)
            assert (a, node) == ("7", "other")


async def test_saved_states_are_used_if_the_node_dies_before_the_next_export(tmp_path: Path) -> None:
    async with run_with_saved_states(tmp_path) as (old, other, clients):
        exporting = old.pause_at("export", pauses_all=True)
        publish_nodes(
            tmp_path / "endpoints.json", [Host(old.endpoint, old.name, state="draining"), to_host(other)]
        )
        await exporting.wait_reached()
        await old.stop_listening()
        await asyncio.gather(*(link.reset() for link in old.connections[:MANY]))
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK_STATEMENT)
            assert (a, node) == ("7", "other")

"""Idle sessions whose states are known: a KILL ends them, and the end of their node does not."""

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
from tests.support.migration.fault_arena import to_host
from tests.support.migration.fleet import NodeSpec, run_fleet
from tests.support.migration.scripted_node import CHECK_STATEMENT, ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import deny_logins, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

MANY = 32
PROBES = 4
"""Most connections with which a node is probed when so many of its sessions end together."""


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("proxied", [False, True], ids=["", "PROXY"])
async def test_who_is_killed_ends_and_the_others_go_on_when_the_node_dies(
    tmp_path: Path, mariadb: MariaDb, secured: bool, proxied: bool
) -> None:
    """Fake TiDB servers. One that requires a PROXY header greets nobody without it."""
    made = [
        NodeSpec(requires_proxy_header=proxied),
        NodeSpec(MigrationRules(rejects_set_states=True), requires_proxy_header=proxied),
        NodeSpec(requires_proxy_header=proxied),
    ]
    tls = PemFiles.create(tmp_path / "certificates") if secured else None
    parts = ModuleConfig(node={"proxy_protocol": "v2"} if proxied else {})
    async with run_fleet(tmp_path, mariadb, parts=parts, specs=made, drained=[1, 2], tls=tls) as nodes:
        first, refuses, third = nodes.nodes
        wires = [await nodes.connect_answer_client() for _ in range(8)]
        for number, wire in enumerate(wires):
            await wire.query(f"set @mine = {number}")
        numbers = [(await wire.query_row("select connection_id()"))[0] for wire in wires]
        nodes.drain(first, third)
        await nodes.wait_stayed("not_restored", len(wires))
        async with nodes.proxy.wait_applied():
            nodes.drain(refuses)
        await nodes.wait_session_counts(8, 0, 0)
        async with _admin(mariadb) as admin:
            for killed in numbers[:4]:
                await admin.query(b"kill " + (killed or b""))
        for wire in wires[:4]:
            assert await with_timeout(wire.reader.read()) == b""
        assert nodes.sessions == [4, 0, 0]
        first.crash()
        await wait_until(lambda: third.node.connections == 4)
        for number, wire in enumerate(wires[4:], 4):
            assert await wire.query_row("select @mine") == (str(number).encode(),)


@asynccontextmanager
async def _admin(mariadb: MariaDb) -> AsyncIterator[RawClient]:
    """A connection to MariaDB itself, whose connection IDs the fake servers use."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mariadb.port)
    try:
        admin = RawClient(reader, writer)
        assert (await admin.login())[0] == 0
        yield admin
    finally:
        writer.close()


@asynccontextmanager
async def known(directory: Path) -> AsyncIterator[tuple[ScriptedNode, ScriptedNode, list[RawClient]]]:
    """A node with sessions whose states are known, and another node that would admit them."""
    endpoints = directory / "endpoints.json"
    old, other = ScriptedNode("old"), ScriptedNode("other")
    parts = ModuleConfig(endpoints=endpoints)
    async with (
        old.listening(),
        other.listening(),
        run_fake_server(deny_logins) as denying,
        run_envoy(directory, [Host("127.0.0.1:1")], parts) as proxy,
    ):
        async with proxy.wait_applied():
            publish_nodes(endpoints, [to_host(old)])
        clients = [await proxy.connect() for _ in range(MANY)]
        for client in clients:
            assert (await with_timeout(client.login()))[0] == 0
            assert (await client.query("set @a = 7"))[0] == 0
        publish_nodes(
            endpoints, [Host(old.endpoint, old.name, state="draining"), Host(denying.endpoint, "denying")]
        )

        async def have_stayed() -> bool:
            return (await proxy.metrics()).get(("migrations", ("old", "denied", "stayed")), 0) >= MANY

        await wait_until(have_stayed)
        async with proxy.wait_applied():
            publish_nodes(endpoints, [to_host(old), to_host(other)])
        yield old, other, clients


async def test_many_sessions_that_end_together_probe_their_node_a_few_times(tmp_path: Path) -> None:
    async with known(tmp_path) as (old, _, clients):
        before = list(old.connections)
        await asyncio.gather(*(link.send_fin() for link in before[:MANY]))
        for client in clients:
            assert await with_timeout(client.reader.read()) == b""
        assert 1 <= len(old.connections) - len(before) <= PROBES


async def test_sessions_that_are_reset_together_were_not_killed(tmp_path: Path) -> None:
    """The node listens, but a KILL ends connections by FIN."""
    async with known(tmp_path) as (old, other, clients):
        await asyncio.gather(*(link.reset() for link in old.connections[:MANY]))
        await wait_until(lambda: len(other.connections) == MANY)
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK_STATEMENT)
            assert (a, node) == ("7", "other")


async def test_known_states_are_used_when_the_node_dies_before_it_exports_them_again(tmp_path: Path) -> None:
    async with known(tmp_path) as (old, other, clients):
        exporting = old.hold_at("export", stays_closed=True)
        publish_nodes(
            tmp_path / "endpoints.json", [Host(old.endpoint, old.name, state="draining"), to_host(other)]
        )
        await exporting.wait_reached()
        await old.stop_listening()
        await asyncio.gather(*(link.reset() for link in old.connections[:MANY]))
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK_STATEMENT)
            assert (a, node) == ("7", "other")

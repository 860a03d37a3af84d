"""Idle sessions whose states are known: a KILL ends them, and the end of their node does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MoveRules
from tests.support.clients.server import Certificates
from tests.support.fake_servers import listening
from tests.support.migration.fault_arena import host
from tests.support.migration.fleet import Made, fleet
from tests.support.migration.scripted_node import CHECK, Actor
from tests.support.module.bootstrap import Host, Parts, tell
from tests.support.module.envoy import denies, envoy, within
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import until

MANY = 32
PROBES = 4
"""Most connections with which a node is probed when so many of its sessions end together."""


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("proxied", [False, True], ids=["", "PROXY"])
async def test_who_is_killed_ends_and_the_others_go_on_when_the_node_dies(
    tmp_path: Path, mariadb: MariaDb, secured: bool, proxied: bool
) -> None:
    """Fake TiDB servers. One that requires a PROXY header greets nobody without it."""
    made = [Made(proxied=proxied), Made(MoveRules(refuse=True), proxied=proxied), Made(proxied=proxied)]
    tls = Certificates.make(tmp_path / "certificates") if secured else None
    parts = Parts(node={"proxy_protocol": "v2"} if proxied else {})
    async with fleet(tmp_path, mariadb, parts=parts, made=made, drained=[1, 2], tls=tls) as nodes:
        first, refuses, third = nodes.nodes
        wires = [await nodes.wire() for _ in range(8)]
        for number, wire in enumerate(wires):
            await wire.query(f"set @mine = {number}")
        numbers = [(await wire.one("select connection_id()"))[0] for wire in wires]
        nodes.drain(first, third)
        await nodes.stayed("not_restored", len(wires))
        async with nodes.proxy.applying():
            nodes.drain(refuses)
        await nodes.settled(8, 0, 0)
        async with _admin(mariadb) as admin:
            for killed in numbers[:4]:
                await admin.query(b"kill " + (killed or b""))
        for wire in wires[:4]:
            assert await within(wire.reader.read()) == b""
        assert nodes.sessions == [4, 0, 0]
        first.crash()
        await until(lambda: third.node.connections == 4)
        for number, wire in enumerate(wires[4:], 4):
            assert await wire.one("select @mine") == (str(number).encode(),)


@asynccontextmanager
async def _admin(mariadb: MariaDb) -> AsyncIterator[Raw]:
    """A connection to MariaDB itself, whose connection IDs the fake servers use."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mariadb.port)
    try:
        admin = Raw(reader, writer)
        assert (await admin.login())[0] == 0
        yield admin
    finally:
        writer.close()


@asynccontextmanager
async def known(directory: Path) -> AsyncIterator[tuple[Actor, Actor, list[Raw]]]:
    """A node with sessions whose states are known, and another node that would admit them."""
    endpoints = directory / "endpoints.json"
    old, other = Actor("old"), Actor("other")
    parts = Parts(endpoints=endpoints)
    async with (
        old.listening(),
        other.listening(),
        listening(denies) as denying,
        envoy(directory, [Host("127.0.0.1:1")], parts) as proxy,
    ):
        async with proxy.applying():
            tell(endpoints, [host(old)])
        clients = [await proxy.client() for _ in range(MANY)]
        for client in clients:
            assert (await within(client.login()))[0] == 0
            assert (await client.query("set @a = 7"))[0] == 0
        tell(endpoints, [Host(old.endpoint, old.name, state="draining"), Host(denying.endpoint, "denying")])

        async def have_stayed() -> bool:
            return (await proxy.metrics()).get(("migrations", ("old", "denied", "stayed")), 0) >= MANY

        await until(have_stayed)
        async with proxy.applying():
            tell(endpoints, [host(old), host(other)])
        yield old, other, clients


async def test_many_sessions_that_end_together_probe_their_node_a_few_times(tmp_path: Path) -> None:
    async with known(tmp_path) as (old, _, clients):
        before = list(old.links)
        await asyncio.gather(*(link.fin() for link in before[:MANY]))
        for client in clients:
            assert await within(client.reader.read()) == b""
        assert 1 <= len(old.links) - len(before) <= PROBES


async def test_sessions_that_are_reset_together_were_not_killed(tmp_path: Path) -> None:
    """The node listens, but a KILL ends connections by FIN."""
    async with known(tmp_path) as (old, other, clients):
        await asyncio.gather(*(link.reset() for link in old.links[:MANY]))
        await until(lambda: len(other.links) == MANY)
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK)
            assert (a, node) == ("7", "other")


async def test_known_states_are_used_when_the_node_dies_before_it_exports_them_again(tmp_path: Path) -> None:
    async with known(tmp_path) as (old, other, clients):
        exporting = old.hold("export", lasting=True)
        tell(tmp_path / "endpoints.json", [Host(old.endpoint, old.name, state="draining"), host(other)])
        await exporting.here()
        await old.stop_listening()
        await asyncio.gather(*(link.reset() for link in old.links[:MANY]))
        for client in clients:
            ((a, _, node),) = await client.rows(CHECK)
            assert (a, node) == ("7", "other")

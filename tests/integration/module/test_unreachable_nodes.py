"""A node becomes unreachable without FIN or RST: its sessions soon end, or are restored elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane import address as addresses
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import MORE_RESULTS, frame, ok
from tests.support.fake_servers import run_fake_server
from tests.support.migration.fleet import MigratingFleet, NodeSpec, run_fleet
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.network_namespace import drop_packets, network_namespace, stop_dropping_packets
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

WATCHING = ModuleConfig(node={"sentinels": True}, live_settings={"login_timeout": 60})

ERROR_WITHIN_SECONDS = 8.0
"""Maximum time from the first dropped packet to the client's error."""
NODES = (NodeSpec(), NodeSpec(migration=MigrationRules(clock_skew_seconds=3600)), NodeSpec())
"""The second node rejects all tokens, so migrations to it fail, and Envoy saves the sessions' states."""
NEW_CLIENTS = 24
"""So many that Envoy also tries the unreachable node, which it prefers least: it has the most sessions."""


@pytest.fixture
def network() -> Iterator[None]:
    with network_namespace():
        yield


def port(address: str) -> int:
    return addresses.split(address)[1]


async def is_ejected(proxy: ModuleEnvoy, node: str) -> bool:
    return (await proxy.metrics()).get(("ejected_since", (node, "vanished")), 0) > 0


async def connection_attempts(proxy: ModuleEnvoy, node: str) -> int:
    """Return how many connections to that node Envoy has begun."""
    stats = (await proxy.hosts("tidb"))[node]["stats"]
    return next(int(stat.get("value", 0)) for stat in stats if stat["name"] == "cx_total")


def code(payload: bytes) -> int:
    assert payload[0] == 0xFF, payload
    return int.from_bytes(payload[1:3], "little")


async def last_error(client: RawClient) -> tuple[int, int, str]:
    """Return the sequence number, code and text of the error that ends a session."""
    sequence, payload = await with_timeout(client.read_packet())
    assert await read_to_end(client) == b""
    return sequence, code(payload), payload[9:].decode()


async def connect_with_saved_states(nodes: MigratingFleet) -> RawClient:
    """Return a session on the first node. Its migration has just failed, so Envoy has saved its states."""
    client = await nodes.connect_raw()
    await client.query("set @a = 'kept'")
    nodes.drain(nodes.nodes[0], nodes.nodes[2])
    await nodes.wait_stayed("denied")
    nodes.drain()
    return client


@pytest.mark.usefixtures("network")
@pytest.mark.needs_migration
async def test_unreachable_node_is_ejected_and_its_sessions_end(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with run_fleet(tmp_path, mariadb, signing, WATCHING, NODES, drained=(1, 2)) as nodes:
        lost, _, other = nodes.nodes
        login = await nodes.proxy.connect()
        await with_timeout(login.read_packet())
        waiting, idle, transaction = [await nodes.connect_raw() for _ in range(3)]
        restorable = await connect_with_saved_states(nodes)
        await idle.query("set @a = 1")
        await transaction.query("begin")
        waiting.writer.write(frame(0, b"\x03select sleep(60)"))
        await nodes.proxy.wait_for_metrics({("sessions", lost.sql_address, "busy"): 1})
        drop_packets(port(lost.sql_address))
        dropped = time.monotonic()
        # Attempts to connect to the lost node must not count as a sign that it is alive.
        for _ in range(NEW_CLIENTS):
            await nodes.proxy.connect()

        sequence, number, text = await last_error(waiting)
        assert time.monotonic() - dropped < ERROR_WITHIN_SECONDS
        assert (sequence, number) == (1, 2013)
        assert lost.sql_address in text
        assert "may have run or not" in text
        for client in (idle, transaction):
            sequence, number, text = await last_error(client)
            assert (sequence, number, lost.sql_address in text) == (1, 1053, True)
        assert code((await with_timeout(login.read_packet()))[1]) == 1105
        assert await with_timeout(restorable.rows("select @a")) == [("kept",)]
        assert time.monotonic() - dropped < ERROR_WITHIN_SECONDS
        await wait_until(lambda: is_ejected(nodes.proxy, lost.sql_address))
        assert time.monotonic() - dropped < ERROR_WITHIN_SECONDS
        assert other.node.connections == 1
        attempts = await connection_attempts(nodes.proxy, lost.sql_address)
        for _ in range(3):
            await connect_logged_in(nodes.proxy)
        assert await connection_attempts(nodes.proxy, lost.sql_address) == attempts

        stop_dropping_packets()
        await nodes.proxy.wait_for_metrics({("ejected_since", lost.sql_address, "vanished"): 0})
        nodes.drain(*nodes.nodes[1:])
        await connect_logged_in(nodes.proxy)
        assert all("expired" in violation for violation in nodes.pop_violations())


@contextlib.asynccontextmanager
async def run_with_partial_answer(
    directory: Path, data: bytes
) -> AsyncIterator[tuple[ModuleEnvoy, str, RawClient]]:
    """Yield an Envoy, its node's endpoint, and a session that received `data` as the start of an answer."""

    async def send_partial_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        await node.read_packet()
        writer.write(data)

    async with (
        run_fake_server(send_partial_answer) as node,
        run_envoy(directory, [node.endpoint], WATCHING) as proxy,
    ):
        client = await connect_logged_in(proxy)
        client.writer.write(frame(0, b"\x03select"))
        yield proxy, node.endpoint, client


@pytest.mark.usefixtures("network")
async def test_error_is_sent_only_between_packets(tmp_path: Path) -> None:
    """After a complete packet the client gets an error, after a partial packet only the FIN."""
    between = frame(1, ok(MORE_RESULTS)) + frame(2, ok(MORE_RESULTS))
    partial_packet = between + frame(3, OK_PAYLOAD)[:-1]
    async with (
        run_with_partial_answer(tmp_path / "between", between) as (_, first_node, client),
        run_with_partial_answer(tmp_path / "within", partial_packet) as (_, second_node, cut_client),
    ):
        assert await with_timeout(client.reader.readexactly(len(between))) == between
        assert await with_timeout(cut_client.reader.readexactly(len(partial_packet))) == partial_packet
        drop_packets(port(first_node), port(second_node))
        sequence, number, text = await last_error(client)
        assert (sequence, number, first_node in text) == (3, 2013, True)
        assert await read_to_end(cut_client) == b""
        stop_dropping_packets()


@pytest.mark.usefixtures("network")
async def test_last_node_is_tried_although_it_is_unreachable(tmp_path: Path) -> None:
    async with run_fake_server(serve_ok) as node, run_envoy(tmp_path, [node.endpoint], WATCHING) as proxy:
        client = await connect_logged_in(proxy)
        drop_packets(port(node.endpoint))
        await last_error(client)
        assert not await is_ejected(proxy, node.endpoint)
        new_client = await proxy.connect()
        stop_dropping_packets()
        assert (await with_timeout(new_client.login()))[0] == 0

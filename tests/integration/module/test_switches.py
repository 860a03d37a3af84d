"""Switches of the module: offloading and migration are switched off and on while sessions are busy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from sandbox.tidb_sim.packets import frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.migration.fault_envoy import FaultEnvoys, MigrationScenario, to_host
from tests.support.migration.fleet import MigratingFleet, NodeSpec, run_fleet
from tests.support.migration.scripted_node import OK_PACKET
from tests.support.module.bootstrap import Host, ModuleConfig, write_live_config
from tests.support.module.envoy import (
    ModuleEnvoy,
    client_tls_config,
    connect_logged_in,
    connect_with_tls,
    run_envoy,
    with_timeout,
)
from tests.support.module.forwarding import (
    DIRECT_AFTER_STATEMENTS,
    ScriptedPeer,
    count_awaiting_writable,
    exchange,
    result,
)
from tests.support.tidb_sim_clients import RawClient, error_code
from tests.support.waiting import assert_never, wait_until

# The tests begin with both parts switched on.
pytestmark = [pytest.mark.needs_migration, pytest.mark.needs_offload]

SESSIONS = 4
MAX_STATEMENT_BYTES, MAX_RESULT_BYTES = 100_000, 300_000
SWITCHES = 6
"""How often offloading is switched off and on again under traffic."""
STAY_SECONDS = 0.5
"""Seconds in which no session may migrate. A migration takes milliseconds."""


def switched_off_by(source: str, **parts: int) -> dict[tuple[str, str, str], int]:
    """Return the module's metrics about what the control plane or Envoy's runtime has switched off."""
    return {("switched_off", source, part): value for part, value in parts.items()}


class Traffic:
    """A session with endless data in both directions: pipelined statements, and their results.

    Client and node know all bytes that they must receive, in order.
    """

    def __init__(self, client: RawClient, node: RawClient, seed: int) -> None:
        self._client, self._node, self._seed = client, node, seed
        self._stop = asyncio.Event()
        self._statements: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=4)
        self._results: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.answered = 0

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for part in (self._send_statements(), self._answer(), self._receive_results()):
                tasks.create_task(part)

    async def _send_statements(self) -> None:
        rng = random.Random(self._seed)
        while not self._stop.is_set():
            statement = frame(0, b"\x03" + rng.randbytes(rng.randrange(1, MAX_STATEMENT_BYTES)))
            await self._statements.put(statement)
            self._client.writer.write(statement)
            await self._client.writer.drain()
        await self._statements.put(None)

    async def _answer(self) -> None:
        rng = random.Random(-self._seed)
        # Few different results, because it takes long to make one.
        results = [result(rng.randrange(1, MAX_RESULT_BYTES), seed) for seed in range(8)]
        while (statement := await self._statements.get()) is not None:
            assert await with_timeout(self._node.reader.readexactly(len(statement))) == statement
            answer = rng.choice(results)
            self._results.put_nowait(answer)
            self._node.writer.write(answer)
            await self._node.writer.drain()
        self._results.put_nowait(None)

    async def _receive_results(self) -> None:
        while (answer := await self._results.get()) is not None:
            assert await with_timeout(self._client.reader.readexactly(len(answer))) == answer
            self.answered += 1


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
async def test_no_byte_is_lost_while_offloading_is_switched(tmp_path: Path, with_tls: bool) -> None:
    certificates = PemFiles.create(tmp_path / "certificates") if with_tls else None
    config = client_tls_config(certificates, allow_cleartext_backend=True) if certificates else ModuleConfig()
    config, peer = replace(config, endpoints=tmp_path / "endpoints.json"), ScriptedPeer()
    assert config.endpoints is not None
    async with run_fake_server(peer) as node, run_envoy(tmp_path, [node.endpoint], config) as proxy:
        sessions = []
        for _ in range(SESSIONS):
            client = await (
                connect_with_tls(proxy, certificates) if certificates else connect_logged_in(proxy)
            )
            sessions.append((client, await with_timeout(peer.nodes.get())))
        peers = {client.writer.get_extra_info("sockname")[1] for client, _ in sessions}
        peers.add(int(node.endpoint.rpartition(":")[2]))

        def with_envoy() -> int:
            """Return how many connections have their events handled by Envoy."""
            return count_awaiting_writable(proxy.pid, peers)

        def switch(*, on: bool) -> None:
            assert config.endpoints is not None
            write_live_config(config.endpoints, [Host(node.endpoint)], {"offload": on})

        await settle(sessions)
        await wait_until(lambda: with_envoy() == 0)
        traffic = [Traffic(client, server, seed) for seed, (client, server) in enumerate(sessions, 1)]
        async with asyncio.TaskGroup() as tasks:
            for one in traffic:
                tasks.create_task(one.run())
            for _ in range(SWITCHES):
                switch(on=False)
                await wait_until(lambda: with_envoy() == 2 * SESSIONS)
                await answer_more(traffic)
                switch(on=True)
                await wait_until(lambda: with_envoy() < 2 * SESSIONS)
                await answer_more(traffic)
            for one in traffic:
                one.stop()
        await settle(sessions)
        await wait_until(lambda: with_envoy() == 0)
        peer.finished.set()


async def settle(sessions: Sequence[tuple[RawClient, RawClient]]) -> None:
    """Run as many statements as the module waits for before it handles the events of a session."""
    for client, node in sessions:
        for _ in range(DIRECT_AFTER_STATEMENTS):
            await exchange(client, node)


async def answer_more(traffic: Sequence[Traffic]) -> None:
    """Wait until each client has received more results."""
    before = [one.answered for one in traffic]
    await wait_until(lambda: all(one.answered > count for one, count in zip(traffic, before, strict=True)))


async def test_idle_sessions_return_to_envoy_on_all_workers(tmp_path: Path) -> None:
    config, peer = ModuleConfig(endpoints=tmp_path / "endpoints.json"), ScriptedPeer()
    assert config.endpoints is not None
    async with (
        run_fake_server(peer) as node,
        run_envoy(tmp_path, [node.endpoint], config, workers=4) as proxy,
    ):
        sessions = [(await connect_logged_in(proxy), await with_timeout(peer.nodes.get())) for _ in range(12)]
        peers = {int(node.endpoint.rpartition(":")[2])}
        await settle(sessions)
        await wait_until(lambda: count_awaiting_writable(proxy.pid, peers) == 0)
        write_live_config(config.endpoints, [Host(node.endpoint)], {"offload": False})
        await wait_until(lambda: count_awaiting_writable(proxy.pid, peers) == len(sessions))
        await proxy.wait_for_metrics(switched_off_by("control_plane", offload=1, migration=0))
        # Bytes go through Envoy, which counts them at once, and not only when a session ends.
        sent = "tcp.sql.downstream_cx_tx_bytes_total"
        before, answer = (await proxy.stats(sent))[sent], result(5_000, seed=1)
        for client, server in sessions:
            await exchange(client, server, answer)

        async def are_counted() -> bool:
            return (await proxy.stats(sent))[sent] >= before + len(sessions) * len(answer)

        await wait_until(are_counted)
        assert count_awaiting_writable(proxy.pid, peers) == len(sessions)
        peer.finished.set()


def switch_migration(fleet: MigratingFleet, *, on: bool) -> None:
    """Switch migrations on or off for the next `fleet.drain`."""
    fleet.live_settings = {"migration": on}


async def test_sessions_stay_on_drained_node_until_migration_is_on(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1], workers=2) as fleet:
        clients = [await fleet.connect_raw() for _ in range(6)]
        await fleet.wait_session_counts(6, 0)
        switch_migration(fleet, on=False)
        async with fleet.proxy.wait_applied():
            fleet.drain(fleet.nodes[0])
        await assert_never(lambda: fleet.sessions != [6, 0], STAY_SECONDS)
        for client in clients:
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        await fleet.proxy.wait_for_metrics(switched_off_by("control_plane", migration=1))
        switch_migration(fleet, on=True)
        fleet.drain(fleet.nodes[0])
        await fleet.wait_session_counts(0, 6)
        for client in clients:
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_offloaded_sessions_migrate_with_offloading_off_and_return_to_envoy(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    config = ModuleConfig(live_settings={"offload": False})
    async with run_fleet(tmp_path, mariadb, config=config, drained=[1]) as fleet:
        clients = [await fleet.connect_raw() for _ in range(4)]
        await fleet.migrate_all()
        peers = {client.writer.get_extra_info("sockname")[1] for client in clients}
        peers |= {int(node.sql_address.rpartition(":")[2]) for node in fleet.nodes}
        await wait_until(lambda: count_awaiting_writable(fleet.proxy.pid, peers) == 2 * len(clients))
        for client in clients:
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_client_learns_that_its_node_stops_if_migration_is_off(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    """TiDB announces it by an error as the answer to COM_PING, which a session that migrates does not see."""
    config, specs = ModuleConfig(live_settings={"migration": False}), (NodeSpec(graceful_wait=60), NodeSpec())
    async with run_fleet(tmp_path, mariadb, config=config, specs=specs, drained=[1]) as fleet:
        client, node = await fleet.connect_raw(), fleet.nodes[0]
        node.request_stop()
        try:
            await wait_until(lambda: node.node.is_reporting_shutdown)
            assert error_code(await with_timeout(client.send_command(0x0E))) == 1053
        finally:
            node.crash()


def publish_drained(scenario: MigrationScenario, *, migration: bool) -> None:
    """Publish the node of the session as draining, and switch migrations on or off."""
    hosts = [Host(scenario.old.endpoint, scenario.old.name, state="draining"), to_host(scenario.new)]
    write_live_config(scenario.envoy.endpoints, hosts, {"migration": migration})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("step", ["connect", "wait", "export", "login"])
async def test_running_migration_is_cancelled(fault_envoys: FaultEnvoys, step: str) -> None:
    async with (await fault_envoys.envoy_for(step)).scenario(step) as scenario:
        gate = await scenario.reach_step(step)
        publish_drained(scenario, migration=False)
        if step == "export":
            gate.proceed()
        await scenario.wait_target_released()
        if step == "wait":
            gate.proceed()
            await scenario.expect_insert_ok(2)
        await scenario.expect_on(scenario.old)
        scenario.rows = -1  # row_count() after the statement of this check
        scenario.new.release_all()
        publish_drained(scenario, migration=True)
        await scenario.expect_migrated()


@pytest.mark.asyncio(loop_scope="module")
async def test_migration_completes_if_it_is_switched_off_too_late(fault_envoys: FaultEnvoys) -> None:
    async with (await fault_envoys.envoy_for("switch")).scenario("switch") as scenario:
        gate = await scenario.reach_step("switch")
        link = await gate.wait_reached()
        await scenario.old.stop_listening()
        await scenario.old.connections[-1].send_fin()
        publish_drained(scenario, migration=False)
        await scenario.envoy.proxy.wait_for_metrics(switched_off_by("control_plane", migration=1))
        link.send(OK_PACKET)
        gate.proceed()
        await scenario.expect_migrated()


@pytest.mark.asyncio(loop_scope="module")
async def test_idle_session_does_not_fail_over(fault_envoys: FaultEnvoys) -> None:
    async with (await fault_envoys.envoy_for("undo")).scenario("undo", third=True) as scenario:
        connection = await scenario.fail_migration()
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        publish_drained(scenario, migration=False)
        await scenario.envoy.proxy.wait_for_metrics(switched_off_by("control_plane", migration=1))
        await scenario.old.stop_listening()
        await connection.send_fin()
        await scenario.expect_ended()
        assert not scenario.third.migration_completed.is_set()


async def modify_runtime(proxy: ModuleEnvoy, **values: str) -> None:
    """Change keys of Envoy's runtime, as an operator does at the admin port."""
    query = "&".join(f"tidevoy.{name}={value}" for name, value in values.items())
    async with http_client(proxy.admin_url, timeout=5.0) as client:
        (await client.post(f"/runtime_modify?{query}")).raise_for_status()


async def test_envoys_runtime_switches_without_a_control_plane(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        client = await fleet.connect_raw()
        peers = {client.writer.get_extra_info("sockname")[1]}
        for _ in range(DIRECT_AFTER_STATEMENTS):
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        await wait_until(lambda: count_awaiting_writable(fleet.proxy.pid, peers) == 0)
        await modify_runtime(fleet.proxy, offload="false", migration="false")
        await wait_until(lambda: count_awaiting_writable(fleet.proxy.pid, peers) == 1)
        await fleet.proxy.wait_for_metrics(switched_off_by("runtime", offload=1, migration=1))
        async with fleet.proxy.wait_applied():
            fleet.drain(fleet.nodes[0])  # publishes that both are on
        await assert_never(lambda: fleet.sessions != [1, 0], STAY_SECONDS)
        await modify_runtime(fleet.proxy, offload="", migration="")
        await fleet.wait_session_counts(0, 1)
        await fleet.proxy.wait_for_metrics(switched_off_by("runtime", offload=0, migration=0))
        for _ in range(DIRECT_AFTER_STATEMENTS):
            assert (await with_timeout(client.send_command(0x0E)))[0] == 0
        await wait_until(lambda: count_awaiting_writable(fleet.proxy.pid, peers) == 0)

"""Envoy stops, gets other resources, or has no free file descriptors during a migration."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.ports import Ports
from sandbox.tidb_sim.packets import frame
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.fault_envoy import FaultEnvoys, MigrationScenario, run_fresh_envoy, to_host
from tests.support.migration.scripted_node import OK_PACKET, SHUTDOWN_ERROR, GateAction
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, with_timeout
from tests.support.module.reconfigurable_envoy import ReconfigurableEnvoy, run_reconfigurable_envoy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PING = b"\x0e"


@asynccontextmanager
async def run_disconnecting_envoy(
    directory: Path, hosts: Sequence[Host | str], config: ModuleConfig
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy that disconnects the clients of a listener as soon as the listener is removed."""
    with Ports() as ports:
        config = replace(config, port=ports.allocate())
        all_hosts = [host if isinstance(host, Host) else Host(host) for host in hosts]
        arguments = ("--drain-time-s", "0", "--drain-strategy", "immediate")
        async with run_reconfigurable_envoy(directory, all_hosts, config, *arguments) as envoy:
            yield envoy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fault_envoys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultEnvoys]:
    async with AsyncExitStack() as stack:
        yield FaultEnvoys(tmp_path_factory.mktemp("changing"), stack, run_disconnecting_envoy)


def reconfigurable(scenario: MigrationScenario) -> ReconfigurableEnvoy:
    assert isinstance(scenario.envoy.proxy, ReconfigurableEnvoy)
    return scenario.envoy.proxy


@pytest.mark.parametrize("case", failure_cases("Envoy", "SIGTERM"), ids=str)
async def test_envoy_stops_during_a_migration(tmp_path: Path, case: FailureCase) -> None:
    """Envoy stops before the time limit and without a crash."""
    async with run_fresh_envoy(tmp_path, tls=case.step == "tls") as envoy, envoy.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        stopping = asyncio.create_task(envoy.proxy.stop())
        if case.step == "switch":
            gate.proceed()
        with suppress(ConnectionResetError):
            assert await with_timeout(scenario.client.reader.read()) == b""
        await with_timeout(stopping)
        assert envoy.proxy.process.returncode == 0


async def test_envoy_stops_during_many_migrations(tmp_path: Path) -> None:
    async with run_fresh_envoy(tmp_path) as envoy, envoy.pause_many("connect") as (clients, _):
        await with_timeout(envoy.proxy.stop())
        for client in clients:
            with suppress(ConnectionResetError):
                assert await with_timeout(client.reader.read()) == b""
        assert envoy.proxy.process.returncode == 0


@pytest.mark.parametrize("case", failure_cases("Envoy", "cluster replaced"), ids=str)
async def test_cluster_is_replaced_during_a_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await reconfigurable(scenario).replace_cluster()
        gate.proceed()
        if case.step == "wait":
            await scenario.expect_insert_ok(2)
        if case.result == "migrates":
            await wait_until(lambda: not scenario.old.open_connections)  # perhaps after several attempts
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("Envoy", "listener removed"), ids=str)
async def test_listener_is_removed_during_a_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await reconfigurable(scenario).remove_listener()
        with suppress(ConnectionResetError):
            assert await with_timeout(scenario.client.reader.read()) == b""
    await reconfigurable(scenario).add_listener()


@pytest.mark.parametrize("case", failure_cases("Envoy", "drain deadline"), ids=str)
async def test_drain_times_out_during_a_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        await scenario.reach_step(case.step)
        scenario.drain(terminate_sessions=True)
        await scenario.expect_outcome(case)


@asynccontextmanager
async def no_free_descriptors(proxy: ModuleEnvoy) -> AsyncIterator[None]:
    """Keep Envoy from opening file descriptors during the block.

    The limit applies to descriptor numbers, so admin connections first fill the unused lower numbers.
    """
    connections: list[asyncio.StreamWriter] = []
    admin_host, admin_port = proxy.admin_url.removeprefix("http://").split(":")

    def gap_count() -> int:
        used = {int(entry.name) for entry in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        return max(used) + 1 - len(used)

    while gap_count():
        reader, writer = await asyncio.open_connection(admin_host, int(admin_port))
        connections.append(writer)
        writer.write(b"GET /ready HTTP/1.1\r\nhost: admin\r\n\r\n")
        await with_timeout(reader.readuntil(b"\r\n\r\n"))  # Envoy has accepted the connection
    limits = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (proxy.descriptor_count(), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, limits)
        for writer in connections:
            writer.transport.abort()


async def publish_both_active(scenario: MigrationScenario) -> None:
    """Publish the old and the new node as active, and wait until Envoy has applied this."""
    scenario.envoy.publish(to_host(scenario.old), to_host(scenario.new))

    async def is_applied() -> bool:
        hosts = await scenario.envoy.proxy.hosts("tidb")
        status = hosts.get(scenario.new.endpoint, {}).get("health_status", {})
        return bool(status.get("eds_health_status") == "HEALTHY")

    await wait_until(is_applied)


@pytest.mark.parametrize("case", failure_cases("Envoy", "no descriptors"), ids=str)
async def test_migration_without_free_descriptors(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        if case.step == "connect":
            await publish_both_active(scenario)
            async with no_free_descriptors(scenario.envoy.proxy):
                await announce_shutdown(scenario)
                await scenario.expect_on(scenario.old)
                assert not scenario.new.connections
            scenario.envoy.expect_failures(scenario.old, "unreachable")
            scenario.rows = -1
        else:
            gate = await scenario.reach_step(case.step)
            async with no_free_descriptors(scenario.envoy.proxy):
                gate.proceed()
                if case.step == "wait":
                    await scenario.expect_insert_ok(2)
                if case.result == "migrates":
                    await wait_until(scenario.new.migration_completed.is_set)
        await scenario.expect_outcome(case)


async def announce_shutdown(scenario: MigrationScenario) -> None:
    """Make the old node answer a ping with a shutdown error. The session migrates, and the client gets OK."""
    ping_gate = scenario.old.pause_at("ping")
    scenario.client.writer.write(frame(0, PING))
    link = await ping_gate.wait_reached()
    link.send(frame(1, SHUTDOWN_ERROR))
    ping_gate.proceed(GateAction.TEST_ANSWERED)
    assert await with_timeout(scenario.client.reader.readexactly(len(OK_PACKET))) == OK_PACKET


async def test_session_migrates_once_descriptors_are_available(tmp_path: Path) -> None:
    """Without free descriptors, Envoy cannot start to forward bytes directly. The session migrates later."""
    async with run_fresh_envoy(tmp_path) as envoy:
        # The module opens one more descriptor later: its own epoll instance.
        envoy.descriptors = envoy.proxy.descriptor_count() + 1
        async with envoy.scenario("no descriptors at first") as scenario:
            async with no_free_descriptors(envoy.proxy):
                for _ in range(10):
                    scenario.send("insert 2")
                    await scenario.expect_insert_ok(2)
            scenario.drain()
            await wait_until(scenario.new.migration_completed.is_set, 5.0)
            await scenario.expect_migrated()

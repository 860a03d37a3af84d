"""Events of Envoy itself during a migration: shutdown, changed resources, no descriptors."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox.ports import Ports
from sandbox.tidb_sim.packets import frame
from tests.support.migration.fault_arena import FaultArenas, MigrationScenario, run_cold_arena, to_host
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.scripted_node import OK_PACKET, SHUTDOWN_ERROR, GateAction
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap
from tests.support.module.envoy import ModuleEnvoy, serve_envoy, with_timeout
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

API = "type.googleapis.com/envoy.config"
TYPE_URLS = {"listeners": f"{API}.listener.v3.Listener", "clusters": f"{API}.cluster.v3.Cluster"}
PING = b"\x0e"


class ReconfigurableEnvoy(ModuleEnvoy):
    """An Envoy that reads listener and cluster from files; a removed listener soon disconnects clients."""

    resources: dict[str, dict[str, Any]]
    """Listener and cluster."""

    def write(self, *enabled_kinds: str) -> None:
        """Write these kinds of resources, and remove the others."""
        for kind, resource_ in self.resources.items():
            file = self.directory / f"{kind}.json"
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps({"resources": [resource_] if kind in enabled_kinds else []}))
            temporary.rename(file)

    async def change(self, counter: str, *enabled_kinds: str) -> None:
        """Write these kinds of resources, and wait until Envoy's counter has increased."""
        before = (await self.stats(counter))[counter]
        self.write(*enabled_kinds)

        async def is_counted() -> bool:
            return (await self.stats(counter))[counter] > before

        await wait_until(is_counted)

    async def replace_cluster(self) -> None:
        """Replace the cluster with one that has another connect timeout."""
        cluster = self.resources["clusters"]
        cluster["connect_timeout"] = f"{float(cluster['connect_timeout'].removesuffix('s')) + 1}s"
        await self.change("cluster_manager.cluster_modified", "listeners", "clusters")

    async def remove_listener(self) -> None:
        await self.change("listener_manager.listener_removed", "clusters")

    async def add_listener(self) -> None:
        await self.change("listener_manager.listener_added", "listeners", "clusters")


@asynccontextmanager
async def run_reconfigurable(
    directory: Path, hosts: Sequence[Host | str], parts: ModuleConfig
) -> AsyncIterator[ModuleEnvoy]:
    """Run a reconfigurable Envoy."""
    with Ports() as ports:
        parts = replace(parts, port=ports.allocate())
        envoy_bootstrap = bootstrap([host if isinstance(host, Host) else Host(host) for host in hosts], parts)
        static = envoy_bootstrap.pop("static_resources")
        envoy_bootstrap["dynamic_resources"] = {
            name: {
                "path_config_source": {"path": str(directory / f"{kind}.json")},
                "resource_api_version": "V3",
            }
            for name, kind in (("lds_config", "listeners"), ("cds_config", "clusters"))
        }
        arguments = ("--drain-time-s", "0", "--drain-strategy", "immediate")
        process = ReconfigurableEnvoy(json.dumps(envoy_bootstrap), directory, arguments=arguments)
        process.resources = {kind: {"@type": TYPE_URLS[kind], **static[kind][0]} for kind in TYPE_URLS}
        process.write(*TYPE_URLS)
        async with serve_envoy(process, parts):
            yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultArenas]:
    async with AsyncExitStack() as stack:
        yield FaultArenas(tmp_path_factory.mktemp("changing"), stack, run_reconfigurable)


def reconfigurable(scenario: MigrationScenario) -> ReconfigurableEnvoy:
    assert isinstance(scenario.arena.proxy, ReconfigurableEnvoy)
    return scenario.arena.proxy


@pytest.mark.parametrize("case", failure_cases("Envoy", "SIGTERM"), ids=str)
async def test_envoy_stops_during_a_migration(tmp_path: Path, case: FailureCase) -> None:
    """Envoy stops in time and without a crash; the arena checks this as well."""
    async with run_cold_arena(tmp_path, tls=case.step == "tls") as arena, arena.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        stopping = asyncio.create_task(arena.proxy.stop())
        if case.step == "switch":
            gate.proceed()
        with suppress(ConnectionResetError):
            assert await with_timeout(scenario.client.reader.read()) == b""
        await with_timeout(stopping)
        assert arena.proxy.process.returncode == 0


async def test_envoy_stops_during_many_migrations(tmp_path: Path) -> None:
    async with run_cold_arena(tmp_path) as arena, arena.hold_many("connect") as (clients, _):
        await with_timeout(arena.proxy.stop())
        for client in clients:
            with suppress(ConnectionResetError):
                assert await with_timeout(client.reader.read()) == b""
        assert arena.proxy.process.returncode == 0


@pytest.mark.parametrize("case", failure_cases("Envoy", "cluster replaced"), ids=str)
async def test_cluster_is_replaced_during_a_migration(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await reconfigurable(scenario).replace_cluster()
        gate.proceed()
        if case.step == "wait":
            await scenario.expect_insert_ok(2)
        if case.result == "moves":
            await wait_until(lambda: not scenario.old.open_connections)  # may take several attempts
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("Envoy", "listener removed"), ids=str)
async def test_listener_is_removed_during_a_migration(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as scenario:
        scenario.arena.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await reconfigurable(scenario).remove_listener()
        with suppress(ConnectionResetError):
            assert await with_timeout(scenario.client.reader.read()) == b""
        await wait_until(lambda: not (scenario.old.open_connections and scenario.new.open_connections))
    await reconfigurable(scenario).add_listener()


@pytest.mark.parametrize("case", failure_cases("Envoy", "drain deadline"), ids=str)
async def test_drain_times_out_during_a_migration(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as scenario:
        scenario.arena.ignored_nodes.add(scenario.old.name)
        await scenario.reach_step(case.step)
        scenario.drain(close=True)
        await scenario.expect_outcome(case)


@asynccontextmanager
async def no_free_descriptors(proxy: ModuleEnvoy) -> AsyncIterator[None]:
    """Let Envoy get no more descriptors. Admin connections fill the gaps between those that it has."""
    connections: list[asyncio.StreamWriter] = []
    admin_host, admin_port = proxy.admin_url.removeprefix("http://").split(":")

    def gap_count() -> int:
        used = {int(entry.name) for entry in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        return max(used) + 1 - len(used)

    while gap_count():
        before = proxy.descriptor_count()
        _, writer = await asyncio.open_connection(admin_host, int(admin_port))
        connections.append(writer)
        await wait_until(lambda before=before: proxy.descriptor_count() > before)  # type: ignore[misc]
    limits = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (proxy.descriptor_count(), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, limits)
        for writer in connections:
            writer.transport.abort()


async def publish_both_active(scenario: MigrationScenario) -> None:
    """Publish both nodes as active, and wait until Envoy has applied this."""
    scenario.arena.publish(to_host(scenario.old), to_host(scenario.new))

    async def is_applied() -> bool:
        hosts = await scenario.arena.proxy.hosts("tidb")
        status = hosts.get(scenario.new.endpoint, {}).get("health_status", {})
        return bool(status.get("eds_health_status") == "HEALTHY")

    await wait_until(is_applied)


@pytest.mark.parametrize("case", failure_cases("Envoy", "no descriptors"), ids=str)
async def test_migration_without_free_descriptors(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as scenario:
        if case.step == "connect":
            await publish_both_active(scenario)
            async with no_free_descriptors(scenario.arena.proxy):
                await announce_shutdown(scenario)
                await scenario.expect_on(scenario.old)
                assert not scenario.new.connections
            scenario.arena.expect_failures(scenario.old, "unreachable")
            scenario.rows = -1
        else:
            gate = await scenario.reach_step(case.step)
            async with no_free_descriptors(scenario.arena.proxy):
                gate.proceed()
                if case.step == "wait":
                    await scenario.expect_insert_ok(2)
                if case.result == "moves":
                    await wait_until(scenario.new.migration_completed.is_set)
        await scenario.expect_outcome(case)


async def announce_shutdown(scenario: MigrationScenario) -> None:
    """Let the old node answer a ping with a shutdown error, so that its sessions migrate.

    The client receives OK.
    """
    ping_gate = scenario.old.hold_at("ping")
    scenario.client.writer.write(frame(0, PING))
    link = await ping_gate.wait_reached()
    link.send(frame(1, SHUTDOWN_ERROR))
    ping_gate.proceed(GateAction.ALREADY_ANSWERED)
    assert await with_timeout(scenario.client.reader.readexactly(len(OK_PACKET))) == OK_PACKET


async def test_session_migrates_once_descriptors_are_available(tmp_path: Path) -> None:
    """There are no descriptors before the first migration and the first direct forwarding."""
    async with run_cold_arena(tmp_path) as arena:
        # Later the module has an epoll descriptor of its own.
        arena.descriptors = arena.proxy.descriptor_count() + 1
        async with arena.scenario("no descriptors at first") as scenario:
            async with no_free_descriptors(arena.proxy):
                for _ in range(10):
                    scenario.send("insert 2")
                    await scenario.expect_insert_ok(2)
            scenario.drain()
            await wait_until(scenario.new.migration_completed.is_set, 5.0)
            await scenario.expect_migrated()

"""What happens to Envoy itself while a session moves."""

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
KINDS = {"listeners": f"{API}.listener.v3.Listener", "clusters": f"{API}.cluster.v3.Cluster"}
PING = b"\x0e"


class Changing(ModuleEnvoy):
    """An Envoy that reads listener and cluster from files; clients of a removed listener are cut soon."""

    resources: dict[str, dict[str, Any]]
    """Listener and cluster."""

    def put(self, *kinds: str) -> None:
        """These, and none of the others, are what it has from now on."""
        for kind, made in self.resources.items():
            file = self.directory / f"{kind}.json"
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps({"resources": [made] if kind in kinds else []}))
            fresh.rename(file)

    async def change(self, counter: str, *kinds: str) -> None:
        """Put these, and wait until Envoy has counted that."""
        before = (await self.stats(counter))[counter]
        self.put(*kinds)

        async def is_counted() -> bool:
            return (await self.stats(counter))[counter] > before

        await wait_until(is_counted)

    async def replace_cluster(self) -> None:
        """By one with another time for connecting."""
        cluster = self.resources["clusters"]
        cluster["connect_timeout"] = f"{float(cluster['connect_timeout'].removesuffix('s')) + 1}s"
        await self.change("cluster_manager.cluster_modified", "listeners", "clusters")

    async def remove_listener(self) -> None:
        await self.change("listener_manager.listener_removed", "clusters")

    async def add_listener(self) -> None:
        await self.change("listener_manager.listener_added", "listeners", "clusters")


@asynccontextmanager
async def changing(
    directory: Path, hosts: Sequence[Host | str], parts: ModuleConfig
) -> AsyncIterator[ModuleEnvoy]:
    """Such an Envoy."""
    with Ports() as ports:
        parts = replace(parts, port=ports.allocate())
        made = bootstrap([one if isinstance(one, Host) else Host(one) for one in hosts], parts)
        static = made.pop("static_resources")
        made["dynamic_resources"] = {
            name: {
                "path_config_source": {"path": str(directory / f"{kind}.json")},
                "resource_api_version": "V3",
            }
            for name, kind in (("lds_config", "listeners"), ("cds_config", "clusters"))
        }
        arguments = ("--drain-time-s", "0", "--drain-strategy", "immediate")
        process = Changing(json.dumps(made), directory, arguments=arguments)
        process.resources = {kind: {"@type": KINDS[kind], **static[kind][0]} for kind in KINDS}
        process.put(*KINDS)
        async with serve_envoy(process, parts):
            yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultArenas]:
    async with AsyncExitStack() as running:
        yield FaultArenas(tmp_path_factory.mktemp("changing"), running, changing)


def proxy_of(play: MigrationScenario) -> Changing:
    assert isinstance(play.arena.proxy, Changing)
    return play.arena.proxy


@pytest.mark.parametrize("case", failure_cases("Envoy", "SIGTERM"), ids=str)
async def test_envoy_is_told_to_end(tmp_path: Path, case: FailureCase) -> None:
    """It ends in time, and without a crash: else the arena says so."""
    async with run_cold_arena(tmp_path, tls=case.step == "tls") as arena, arena.scenario(case) as play:
        gate = await play.reach_step(case.step)
        ends = asyncio.create_task(arena.proxy.stop())
        if case.step == "switch":
            gate.proceed()
        with suppress(ConnectionResetError):
            assert await with_timeout(play.client.reader.read()) == b""
        await with_timeout(ends)
        assert arena.proxy.process.returncode == 0


async def test_envoy_is_told_to_end_while_many_move(tmp_path: Path) -> None:
    async with run_cold_arena(tmp_path) as arena, arena.hold_many("connect") as (clients, _):
        await with_timeout(arena.proxy.stop())
        for client in clients:
            with suppress(ConnectionResetError):
                assert await with_timeout(client.reader.read()) == b""
        assert arena.proxy.process.returncode == 0


@pytest.mark.parametrize("case", failure_cases("Envoy", "cluster replaced"), ids=str)
async def test_the_cluster_is_replaced(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await proxy_of(play).replace_cluster()
        gate.proceed()
        if case.step == "wait":
            await play.expect_insert_ok(2)
        if case.result == "moves":
            await wait_until(lambda: not play.old.open_connections)  # not at the first try
        await play.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("Envoy", "listener removed"), ids=str)
async def test_the_listener_is_removed(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        play.arena.ignored_nodes.add(play.old.name)
        gate = await play.reach_step(case.step)
        if case.step == "switch":
            gate.proceed()
        await proxy_of(play).remove_listener()
        with suppress(ConnectionResetError):
            assert await with_timeout(play.client.reader.read()) == b""
        await wait_until(lambda: not (play.old.open_connections and play.new.open_connections))
    await proxy_of(play).add_listener()


@pytest.mark.parametrize("case", failure_cases("Envoy", "deadline of the drain"), ids=str)
async def test_the_time_of_the_drain_is_over(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        play.arena.ignored_nodes.add(play.old.name)
        await play.reach_step(case.step)
        play.drain(close=True)
        await play.expect_outcome(case)


@asynccontextmanager
async def none_left(proxy: ModuleEnvoy) -> AsyncIterator[None]:
    """Envoy gets no more descriptors. Gaps between those that it has are filled by clients of its admin."""
    fillers: list[asyncio.StreamWriter] = []
    admin_host, admin_port = proxy.admin_url.removeprefix("http://").split(":")

    def gaps() -> int:
        used = {int(entry.name) for entry in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        return max(used) + 1 - len(used)

    while gaps():
        before = proxy.descriptor_count()
        _, writer = await asyncio.open_connection(admin_host, int(admin_port))
        fillers.append(writer)
        await wait_until(lambda before=before: proxy.descriptor_count() > before)  # type: ignore[misc]
    limits = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (proxy.descriptor_count(), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, limits)
        for writer in fillers:
            writer.transport.abort()


async def may_move(play: MigrationScenario) -> None:
    """The target may be moved to, and Envoy knows."""
    play.arena.publish(to_host(play.old), to_host(play.new))

    async def is_known() -> bool:
        hosts = await play.arena.proxy.hosts("tidb")
        status = hosts.get(play.new.endpoint, {}).get("health_status", {})
        return bool(status.get("eds_health_status") == "HEALTHY")

    await wait_until(is_known)


@pytest.mark.parametrize("case", failure_cases("Envoy", "no descriptors"), ids=str)
async def test_there_are_no_descriptors(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        if case.step == "connect":
            await may_move(play)
            async with none_left(play.arena.proxy):
                await announces_its_end(play)
                await play.expect_on(play.old)
                assert not play.new.connections
            play.arena.expect_failures(play.old, "unreachable")
            play.rows = -1
        else:
            gate = await play.reach_step(case.step)
            async with none_left(play.arena.proxy):
                gate.proceed()
                if case.step == "wait":
                    await play.expect_insert_ok(2)
                if case.result == "moves":
                    await wait_until(play.new.migration_completed.is_set)
        await play.expect_outcome(case)


async def announces_its_end(play: MigrationScenario) -> None:
    """The old node says so when it is pinged: its sessions are to leave. Their clients need not know."""
    stops = play.old.hold_at("ping")
    play.client.writer.write(frame(0, PING))
    link = await stops.wait_reached()
    link.send(frame(1, SHUTDOWN_ERROR))
    stops.proceed(GateAction.ALREADY_ANSWERED)
    assert await with_timeout(play.client.reader.readexactly(len(OK_PACKET))) == OK_PACKET


async def test_descriptors_that_were_missing_at_first_are_found_later(tmp_path: Path) -> None:
    """Before any session has moved, or was read past Envoy."""
    async with run_cold_arena(tmp_path) as arena:
        # Later there is the module's own epoll descriptor, too.
        arena.descriptors = arena.proxy.descriptor_count() + 1
        async with arena.scenario("none at first") as play:
            async with none_left(arena.proxy):
                for _ in range(10):
                    play.send("insert 2")
                    await play.expect_insert_ok(2)
            play.drain()
            await wait_until(play.new.migration_completed.is_set, 5.0)
            await play.expect_migrated()

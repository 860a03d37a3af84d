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
from tests.support.migration.fault_arena import Arenas, Play, cold_arena, host
from tests.support.migration.fault_cases import Case, cases
from tests.support.migration.scripted_node import OK, STOPPING, Next
from tests.support.module.bootstrap import Host, Parts, bootstrap
from tests.support.module.envoy import Envoy, serving, within
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

API = "type.googleapis.com/envoy.config"
KINDS = {"listeners": f"{API}.listener.v3.Listener", "clusters": f"{API}.cluster.v3.Cluster"}
PING = b"\x0e"


class Changing(Envoy):
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

        await until(is_counted)

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
async def changing(directory: Path, hosts: Sequence[Host | str], parts: Parts) -> AsyncIterator[Envoy]:
    """Such an Envoy."""
    with Ports() as ports:
        parts = replace(parts, port=ports.take())
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
        async with serving(process, parts):
            yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arenas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arenas]:
    async with AsyncExitStack() as running:
        yield Arenas(tmp_path_factory.mktemp("changing"), running, changing)


def proxy_of(play: Play) -> Changing:
    assert isinstance(play.arena.proxy, Changing)
    return play.arena.proxy


@pytest.mark.parametrize("case", cases("Envoy", "SIGTERM"), ids=str)
async def test_envoy_is_told_to_end(tmp_path: Path, case: Case) -> None:
    """It ends in time, and without a crash: else the arena says so."""
    async with cold_arena(tmp_path, tls=case.step == "tls") as arena, arena.play(case) as play:
        gate = await play.reach(case.step)
        ends = asyncio.create_task(arena.proxy.stop())
        if case.step == "switch":
            gate.open()
        with suppress(ConnectionResetError):
            assert await within(play.client.reader.read()) == b""
        await within(ends)
        assert arena.proxy.process.returncode == 0


async def test_envoy_is_told_to_end_while_many_move(tmp_path: Path) -> None:
    async with cold_arena(tmp_path) as arena, arena.many("connect") as (clients, _):
        await within(arena.proxy.stop())
        for client in clients:
            with suppress(ConnectionResetError):
                assert await within(client.reader.read()) == b""
        assert arena.proxy.process.returncode == 0


@pytest.mark.parametrize("case", cases("Envoy", "cluster replaced"), ids=str)
async def test_the_cluster_is_replaced(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step)
        if case.step == "switch":
            gate.open()
        await proxy_of(play).replace_cluster()
        gate.open()
        if case.step == "wait":
            await play.inserted(2)
        if case.result == "moves":
            await until(lambda: not play.old.open_links)  # not at the first try
        await play.comes_to(case)


@pytest.mark.parametrize("case", cases("Envoy", "listener removed"), ids=str)
async def test_the_listener_is_removed(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        play.arena.unjudged.add(play.old.name)
        gate = await play.reach(case.step)
        if case.step == "switch":
            gate.open()
        await proxy_of(play).remove_listener()
        with suppress(ConnectionResetError):
            assert await within(play.client.reader.read()) == b""
        await until(lambda: not (play.old.open_links and play.new.open_links))
    await proxy_of(play).add_listener()


@pytest.mark.parametrize("case", cases("Envoy", "deadline of the drain"), ids=str)
async def test_the_time_of_the_drain_is_over(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        play.arena.unjudged.add(play.old.name)
        await play.reach(case.step)
        play.drain(close=True)
        await play.comes_to(case)


@asynccontextmanager
async def none_left(proxy: Envoy) -> AsyncIterator[None]:
    """Envoy gets no more descriptors. Gaps between those that it has are filled by clients of its admin."""
    fillers: list[asyncio.StreamWriter] = []
    admin_host, admin_port = proxy.admin.removeprefix("http://").split(":")

    def gaps() -> int:
        used = {int(entry.name) for entry in Path(f"/proc/{proxy.pid}/fd").iterdir()}
        return max(used) + 1 - len(used)

    while gaps():
        before = proxy.descriptors()
        _, writer = await asyncio.open_connection(admin_host, int(admin_port))
        fillers.append(writer)
        await until(lambda before=before: proxy.descriptors() > before)  # type: ignore[misc]
    limits = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (proxy.descriptors(), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, limits)
        for writer in fillers:
            writer.transport.abort()


async def may_move(play: Play) -> None:
    """The target may be moved to, and Envoy knows."""
    play.arena.tell(host(play.old), host(play.new))

    async def is_known() -> bool:
        hosts = await play.arena.proxy.hosts("tidb")
        status = hosts.get(play.new.endpoint, {}).get("health_status", {})
        return bool(status.get("eds_health_status") == "HEALTHY")

    await until(is_known)


@pytest.mark.parametrize("case", cases("Envoy", "no descriptors"), ids=str)
async def test_there_are_no_descriptors(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        if case.step == "connect":
            await may_move(play)
            async with none_left(play.arena.proxy):
                await announces_its_end(play)
                await play.is_on(play.old)
                assert not play.new.links
            play.arena.expect_more(play.old, "unreachable")
            play.rows = -1
        else:
            gate = await play.reach(case.step)
            async with none_left(play.arena.proxy):
                gate.open()
                if case.step == "wait":
                    await play.inserted(2)
                if case.result == "moves":
                    await until(play.new.arrived.is_set)
        await play.comes_to(case)


async def announces_its_end(play: Play) -> None:
    """The old node says so when it is pinged: its sessions are to leave. Their clients need not know."""
    stops = play.old.hold("ping")
    play.client.writer.write(frame(0, PING))
    link = await stops.here()
    link.send(frame(1, STOPPING))
    stops.open(Next.SAID)
    assert await within(play.client.reader.readexactly(len(OK))) == OK


async def test_descriptors_that_were_missing_at_first_are_found_later(tmp_path: Path) -> None:
    """Before any session has moved, or was read past Envoy."""
    async with cold_arena(tmp_path) as arena:
        # Later there is the module's own epoll descriptor, too.
        arena.descriptors = arena.proxy.descriptors() + 1
        async with arena.play("none at first") as play:
            async with none_left(arena.proxy):
                for _ in range(10):
                    play.ask("insert 2")
                    await play.inserted(2)
            play.drain()
            await until(play.new.arrived.is_set, 5.0)
            await play.moves()

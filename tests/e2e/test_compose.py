"""docker-compose.yml as it stands, on a Docker daemon of our own, with local images under upstream names."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
import pymysql
import pytest

from sandbox.ports import Ports, PortTaken
from tests.e2e.compose import images
from tests.e2e.compose.daemon import Docker, docker_daemon, interfaces, remains

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Docker daemon"),
]

NODES = ("tidb-0:4000", "tidb-1:4000", "tidb-2:4000")


@dataclass(frozen=True)
class Stack:
    """The running stack, as a user meets it: two published ports and the command lines."""

    docker: Docker
    rest: httpx2.AsyncClient
    sql_port: int
    env: dict[str, str]

    async def compose(self, *arguments: str, timeout: float = 120.0) -> str:
        return await self.docker.compose(*arguments, project=images.REPOSITORY, timeout=timeout, env=self.env)

    async def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` says of the container of `service`."""
        container = (await self.compose("ps", "--quiet", service)).strip()
        found: dict[str, Any] = json.loads(await self.docker("inspect", container))[0]
        return found

    async def nodes(self) -> dict[str, dict[str, Any]]:
        answer = (await self.rest.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in answer.json()["nodes"]}

    async def state(self, address: str) -> str | None:
        return (await self.nodes()).get(address, {}).get("state")

    async def acknowledged(self) -> bool:
        """Whether every Envoy runs what was published last."""
        envoys = (await self.rest.get("/v1/envoys")).raise_for_status().json()["envoys"]
        return bool(envoys) and all(envoy["acked_version"] == envoy["published_version"] for envoy in envoys)

    def connect(self) -> pymysql.Connection[Any]:
        return pymysql.connect(host="127.0.0.1", port=self.sql_port, user="root", connect_timeout=10)

    async def spread(self, count: int) -> Counter[str]:
        """On which TiDB servers `count` new sessions get."""
        return Counter([await asyncio.to_thread(self._place) for _ in range(count)])

    def _place(self) -> str:
        with self.connect() as session:
            return place(session)


def place(session: pymysql.Connection[Any]) -> str:
    """The address of the stand-in that a session is on."""
    with session.cursor() as cursor:
        cursor.execute("select @@hostname")
        row = cursor.fetchone()
    assert row is not None
    return str(row[0])


async def until(what: str, holds: Callable[[], Awaitable[bool]], timeout: float = 60.0) -> None:
    """Wait until `holds`; the test fails with `what` after `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not await holds():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout:.0f} s: {what}"
        await asyncio.sleep(0.2)


def published(ports: Ports, usual: int) -> int:
    """The usual port, or another when something of this machine has that one."""
    try:
        return ports.take_this(usual)
    except PortTaken:
        return ports.take()


@pytest.fixture
async def stack(ports: Ports) -> AsyncIterator[Stack]:
    """`docker-compose up -d` of docker-compose.yml, and afterwards a proof that nothing is left of it."""
    links = interfaces()
    cache = images.cache_directory()
    sql, api = published(ports, 6000), published(ports, 3080)
    env = {
        "TIDEVOY_SQL_PORT": str(sql),
        "TIDEVOY_API_PORT": str(api),
        "PROMETHEUS_PORT": str(published(ports, 9090)),
        "GRAFANA_PORT": str(published(ports, 3000)),
    }
    async with docker_daemon(cache) as docker:
        await images.build_all(docker, cache)
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{api}", trust_env=False, timeout=10.0
        ) as rest:
            running = Stack(docker, rest, sql, env)
            try:
                await running.compose("up", "--detach", "--no-build", timeout=300.0)
                yield running
            finally:
                # Shown if the test failed.
                print(await running.compose("logs", "--no-color", "--tail=40"))
                await running.compose("down", "--volumes", timeout=200.0)
        assert (await docker("ps", "--all", "--quiet")).split() == []
        assert (await docker("volume", "ls", "--quiet")).split() == []
        networks = await docker("network", "ls", "--format", "{{.Name}}")
        assert set(networks.split()) <= {"bridge", "host", "none"}
    assert remains(docker.directory) == []
    assert interfaces() <= links


async def test_the_stack_serves_drains_and_grows(stack: Stack) -> None:
    await until("three nodes are active", partial(_all_active, stack, NODES))
    for service in images.services():
        await until(f"{service} is healthy", partial(_is_healthy, stack, service))
    await _confined(stack)

    kept = await _one_session_on_each(stack)
    drained, stopped, fourth = NODES[1], NODES[2], "tidb-3:4000"
    try:
        # Drained by REST: not one new session gets there, and the session that is there goes on.
        answer = await stack.rest.post(f"/v1/nodes/{drained}/drain", json={"deadline_seconds": 60})
        assert answer.status_code == 202, answer.text
        await until("the drain is published", partial(_is, stack, drained, "draining"))
        await until("Envoy acknowledged the drain", stack.acknowledged)
        assert drained not in await stack.spread(30)
        assert "drained by an operator" in await stack.compose(
            "exec", "-T", "controlplane", "tidevoy", "nodes", "--json"
        )
        assert await asyncio.to_thread(place, kept[drained]) == drained

        # A fourth server, found through PD; and the drained one comes back.
        async with _server(stack, "tidb-3"):
            await until("the fourth node is active", partial(_is, stack, fourth, "active"))
            await until("the fourth node gets sessions", partial(_gets_sessions, stack, fourth))
            answer = await stack.rest.post(f"/v1/nodes/{drained}/undrain")
            assert answer.status_code == 202, answer.text
            await until("the drained node gets sessions again", partial(_gets_sessions, stack, drained))

            # Its grace period lets a server end by itself, and no new session fails meanwhile.
            stopping = asyncio.create_task(stack.compose("stop", stopped.partition(":")[0]))
            while not stopping.done():
                await stack.spread(5)
            await stopping
            assert (await stack.container(stopped.partition(":")[0]))["State"]["ExitCode"] == 0
    finally:
        for session in kept.values():
            session.close()


async def _one_session_on_each(stack: Stack) -> dict[str, pymysql.Connection[Any]]:
    kept: dict[str, pymysql.Connection[Any]] = {}
    async with asyncio.timeout(60):
        while len(kept) < len(NODES):
            session = await asyncio.to_thread(stack.connect)
            where = await asyncio.to_thread(place, session)
            if kept.setdefault(where, session) is not session:
                session.close()
    return kept


@asynccontextmanager
async def _server(stack: Stack, name: str) -> AsyncIterator[None]:
    """One more TiDB server, which is not in the compose file."""
    await stack.docker(
        *("run", "--detach", "--network=tidevoy_cluster", f"--network-alias={name}", f"--name={name}"),
        images.services()["tidb-0"]["image"],
        *("--store=tikv", "--path=pd:2379", f"--advertise-address={name}"),
    )
    try:
        yield
    finally:
        await stack.docker("rm", "--force", name)


async def _all_active(stack: Stack, addresses: tuple[str, ...]) -> bool:
    nodes = await stack.nodes()
    return all(nodes.get(address, {}).get("state") == "active" for address in addresses)


async def _is_healthy(stack: Stack, service: str) -> bool:
    state = (await stack.container(service))["State"]
    return bool(state["Health"]["Status"] == "healthy")


async def _is(stack: Stack, address: str, state: str) -> bool:
    return await stack.state(address) == state


async def _gets_sessions(stack: Stack, name: str) -> bool:
    return name in await stack.spread(10)


async def _confined(stack: Stack) -> None:
    """What we build runs without root, without a writable root file system and without capabilities."""
    for service in ("controlplane", "envoy"):
        uid = await stack.compose("exec", "-T", service, "id", "-u")
        assert uid.strip() != "0"
        host = (await stack.container(service))["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        status = await stack.compose("exec", "-T", service, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status

"""docker-compose.yml as it stands, on a Docker daemon of our own, with local images under upstream names."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pymysql
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from sandbox.ports import Ports, PortTaken
from sandbox.server import sends_mysql_greeting
from tests.support.compose import images
from tests.support.compose.commands import CommandFailed
from tests.support.compose.docker_daemon import Docker, find_leftovers, interfaces
from tests.support.compose.stateful_sessions import run_stateful_sessions
from tests.support.prebuild import Prebuild

READY = "tests.support.compose.prebuilt_images"
# Building the images takes longer than all tests.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.compose,
    pytest.mark.ahead(READY),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Docker daemon"),
]

NODES = ("tidb-0:4000", "tidb-1:4000", "tidb-2:4000")
CERTIFICATE = "session-certificate"
GUESTS = 60


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

    async def started(self, *services: str) -> list[str]:
        """When the containers of these services were started last; times that can be compared."""
        names = (f"tidevoy_{service}_1" for service in services)
        return (await self.docker("inspect", "--format", "{{.State.StartedAt}}", *names)).split()

    async def nodes(self) -> dict[str, dict[str, Any]]:
        answer = (await self.rest.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in answer.json()["nodes"]}

    async def state(self, address: str) -> str | None:
        return (await self.nodes()).get(address, {}).get("state")

    async def moves(self, address: str) -> Counter[str]:
        """How moves of sessions away from a node have ended."""
        told = (await self.rest.get("/metrics")).raise_for_status().text
        ends: Counter[str] = Counter()
        for family in text_string_to_metric_families(told):
            for sample in family.samples:
                if sample.name == "tidevoy_migrations_total" and sample.labels["node"] == address:
                    ends[sample.labels["result"]] += int(sample.value)
        return +ends

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
        return ports.claim(usual)
    except PortTaken:
        return ports.allocate()


@pytest.fixture(scope="module")
def docker(ahead: Mapping[str, Prebuild]) -> Iterator[Docker]:
    """A daemon that has the images, and afterwards a proof that nothing is left of it."""
    maker = ahead[READY]
    docker = Docker(Path(maker.wait_ready()))
    yield docker
    assert maker.stop() == 0, maker.log()
    assert find_leftovers(docker.directory) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(docker: Docker) -> AsyncIterator[Stack]:
    """`docker-compose up -d` of docker-compose.yml, and afterwards a proof that nothing is left of it."""
    with Ports() as ports:
        sql, api = published(ports, 6000), published(ports, 3080)
        env = {
            "TIDEVOY_SQL_PORT": str(sql),
            "TIDEVOY_API_PORT": str(api),
            "PROMETHEUS_PORT": str(published(ports, 9090)),
            "GRAFANA_PORT": str(published(ports, 3000)),
        }
        async with _up(docker, sql, api, env) as stack:
            yield stack


@asynccontextmanager
async def _up(docker: Docker, sql: int, api: int, env: dict[str, str]) -> AsyncIterator[Stack]:
    links = interfaces()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{api}", trust_env=False, timeout=10.0) as rest:
        stack = Stack(docker, rest, sql, env)
        try:
            await stack.compose("up", "--detach", "--no-build", timeout=300.0)
            yield stack
        finally:
            # Shown if a test failed.
            print(await stack.compose("logs", "--no-color", "--tail=40"))
            # The tests show that a server ends by itself if it is given the time.
            await stack.compose("down", "--volumes", "--timeout=1", timeout=200.0)
    assert (await docker("ps", "--all", "--quiet")).split() == []
    assert (await docker("volume", "ls", "--quiet")).split() == []
    networks = await docker("network", "ls", "--format", "{{.Name}}")
    assert set(networks.split()) <= {"bridge", "host", "none"}
    assert interfaces() <= links


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running: Stack) -> Stack:
    """All three servers are there, and clients reach them through the published port."""
    await until("three nodes are active", partial(_all_active, running, NODES))
    # Docker accepts connections to a published port before Envoy listens behind it, and closes them.
    await until("a server greets a client", partial(sends_mysql_greeting, running.sql_port))
    await until("all three get sessions", partial(_all_get_sessions, running))
    return running


async def test_a_restart_of_a_server_costs_no_session(stack: Stack) -> None:
    """Nobody drains it: it is told to stop, says so, and its sessions leave."""
    restarted = NODES[0]
    over = asyncio.Event()
    async with run_stateful_sessions(stack.sql_port, GUESTS) as all_:
        there = [guest for guest in all_ if await guest.node_address() == restarted]
        # One half works. The others send nothing until they are looked at.
        working = all_[: GUESTS // 2]
        assert {guest in working for guest in there} == {True, False}
        before = await stack.started("tidb-0")
        async with asyncio.TaskGroup() as tasks:
            for guest in working:
                tasks.create_task(guest.run(over))
            await stack.compose("restart", "tidb-0")
            over.set()
        assert await stack.started("tidb-0") > before

        # At once, since sessions may come back when it is in service again.
        places = Counter([await guest.node_address() for guest in all_])
        for guest in all_:
            await guest.check()
        print(
            f"\n{len(there)} of {GUESTS} sessions were on {restarted}; now {dict(places)};"
            f" {sum(guest.finished_turns for guest in working)} turns,"
            f" slowest answer {max(guest.max_latency_seconds for guest in all_) * 1000:.0f} ms"
        )
        assert set(places) == set(NODES[1:])
        assert all(len(guest.visited_nodes) > 1 for guest in working if guest in there)
        await until("all moves are counted", partial(_have_moved, stack, restarted, len(there)))
        await until(f"{restarted} is active again", partial(_is, stack, restarted, "active"))
        await until("new sessions get there", partial(_gets_sessions, stack, restarted))
        for guest in all_:
            await guest.check()


async def test_the_certificate_is_made_once_and_for_the_servers_alone(stack: Stack) -> None:
    for node in (await stack.nodes()).values():
        assert node["hindrances"] == []
    servers = [name.partition(":")[0] for name in NODES]
    look = "cd /etc/tidb-session && stat -c '%a %u %n' . * && cat *"
    made = await stack.compose("exec", "-T", "tidb-1", "sh", "-c", look)
    assert made.splitlines()[:3] == ["700 0 .", "600 0 session.crt", "600 0 session.key"]
    with pytest.raises(CommandFailed, match="Read-only file system"):
        await stack.compose("exec", "-T", "tidb-1", "touch", "/etc/tidb-session/session.key")

    # Another `up` looks at it again, and disturbs nobody.
    before, first = await stack.started(*servers), await stack.started(CERTIFICATE)
    await stack.compose("up", "--detach", "--no-build")
    assert await stack.started(CERTIFICATE) > first
    assert await _is_healthy(stack, CERTIFICATE)
    assert await stack.started(*servers) == before
    assert await stack.compose("exec", "-T", "tidb-1", "sh", "-c", look) == made


async def test_the_stack_serves_drains_and_grows(stack: Stack) -> None:
    for service in images.services():
        await until(f"{service} is healthy", partial(_is_healthy, stack, service))
    await _confined(stack)

    kept = await _one_session_on_each(stack)
    drained, stopped, fourth = NODES[1], NODES[2], "tidb-3:4000"
    try:
        # Drained by REST: not one new session gets there, and the session that is there goes on elsewhere.
        answer = await stack.rest.post(f"/v1/nodes/{drained}/drain", json={"deadline_seconds": 60})
        assert answer.status_code == 202, answer.text
        await until("the drain is published", partial(_is, stack, drained, "draining"))
        await until("Envoy acknowledged the drain", stack.acknowledged)
        assert drained not in await stack.spread(30)
        assert "drained by an operator" in await stack.compose(
            "exec", "-T", "controlplane", "tidevoy", "nodes", "--json"
        )
        await until("its session has moved", partial(_is_elsewhere, kept[drained], drained))

        # A fourth server, found through PD; and the drained one comes back.
        async with _server(stack, "tidb-3"):
            await until("the fourth node is active", partial(_is, stack, fourth, "active"))
            await until("the fourth node gets sessions", partial(_gets_sessions, stack, fourth))
            answer = await stack.rest.post(f"/v1/nodes/{drained}/undrain")
            assert answer.status_code == 202, answer.text
            await until("the drained node gets sessions again", partial(_gets_sessions, stack, drained))

            # Its grace period lets a server end by itself, and no session fails meanwhile, old or new.
            stopping = asyncio.create_task(stack.compose("stop", stopped.partition(":")[0]))
            while not stopping.done():
                await stack.spread(5)
            await stopping
            assert (await stack.container(stopped.partition(":")[0]))["State"]["ExitCode"] == 0
            for session in kept.values():
                assert await _is_elsewhere(session, stopped)
    finally:
        for session in kept.values():
            session.close()
        await stack.compose("start", stopped.partition(":")[0])


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
    """One more TiDB server, which is not in the compose file; docs/operate/docker-compose.md tells how."""
    await stack.docker(
        *("run", "--detach", "--network=tidevoy_cluster", f"--network-alias={name}", f"--name={name}"),
        f"--volume={images.REPOSITORY}/deploy/tidb.toml:/etc/tidb.toml:ro",
        f"--volume=tidevoy_{CERTIFICATE}:/etc/tidb-session:ro",
        images.services()["tidb-0"]["image"],
        *("--store=tikv", "--path=pd:2379", f"--advertise-address={name}", "--config=/etc/tidb.toml"),
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
    if service == CERTIFICATE:
        return bool(state["Status"] == "exited" and state["ExitCode"] == 0)
    return bool(state["Health"]["Status"] == "healthy")


async def _is(stack: Stack, address: str, state: str) -> bool:
    return await stack.state(address) == state


async def _is_elsewhere(session: pymysql.Connection[Any], address: str) -> bool:
    return await asyncio.to_thread(place, session) != address


async def _have_moved(stack: Stack, address: str, count: int) -> bool:
    ends = await stack.moves(address)
    assert ends["lost"] == 0
    return ends["moved"] >= count


async def _all_get_sessions(stack: Stack) -> bool:
    return (await stack.spread(10)).keys() == set(NODES)


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

"""docker-compose.yml on a Docker daemon that the tests start, with local images in place of upstream's."""

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
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from sandbox.ports import Ports, PortTaken
from sandbox.server import http_client, sends_mysql_greeting
from tests.support.cache import cache_directory
from tests.support.compose import images
from tests.support.compose.commands import CommandFailed
from tests.support.compose.docker_daemon import Docker, docker_daemon, find_leftovers, interfaces
from tests.support.compose.stateful_sessions import run_stateful_sessions

# Building the images takes minutes.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Docker daemon"),
]

NODES = ("tidb-0:4000", "tidb-1:4000", "tidb-2:4000")
CERTIFICATE = "session-certificate"
SESSION_COUNT = 60


@dataclass(frozen=True)
class Stack:
    """The running stack as a user sees it: two published ports and docker-compose."""

    docker: Docker
    rest: httpx2.AsyncClient
    sql_port: int
    env: dict[str, str]

    async def compose(self, *arguments: str, timeout: float = 120.0) -> str:
        return await self.docker.compose(*arguments, project=images.REPOSITORY, timeout=timeout, env=self.env)

    async def container(self, service: str) -> dict[str, Any]:
        """Return what `docker inspect` reports about the container of `service`."""
        container = (await self.compose("ps", "--quiet", service)).strip()
        details: dict[str, Any] = json.loads(await self.docker("inspect", container))[0]
        return details

    async def started(self, *services: str) -> list[str]:
        """Return the start times of the containers of these services, as text that sorts by time."""
        names = (f"tidevoy_{service}_1" for service in services)
        return (await self.docker("inspect", "--format", "{{.State.StartedAt}}", *names)).split()

    async def nodes(self) -> dict[str, dict[str, Any]]:
        answer = (await self.rest.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in answer.json()["nodes"]}

    async def state(self, address: str) -> str | None:
        return (await self.nodes()).get(address, {}).get("state")

    async def migration_results(self, address: str) -> Counter[str]:
        """Return the number of migrations away from a node, per result."""
        metrics_text = (await self.rest.get("/metrics")).raise_for_status().text
        results: Counter[str] = Counter()
        for family in text_string_to_metric_families(metrics_text):
            for sample in family.samples:
                if sample.name == "tidevoy_migrations_total" and sample.labels["node"] == address:
                    results[sample.labels["result"]] += int(sample.value)
        return +results

    async def is_acknowledged(self) -> bool:
        """Return whether every Envoy has acknowledged the last published version."""
        envoys = (await self.rest.get("/v1/envoys")).raise_for_status().json()["envoys"]
        return bool(envoys) and all(envoy["acked_version"] == envoy["published_version"] for envoy in envoys)

    def connect(self) -> pymysql.Connection[Any]:
        return pymysql.connect(host="127.0.0.1", port=self.sql_port, user="root", connect_timeout=10)

    async def count_new_sessions(self, count: int) -> Counter[str]:
        """Open `count` new sessions. Return how many each TiDB server gets."""
        return Counter([await asyncio.to_thread(self._node_of_new_session) for _ in range(count)])

    def _node_of_new_session(self) -> str:
        with self.connect() as session:
            return node_of_session(session)


def node_of_session(session: pymysql.Connection[Any]) -> str:
    """Return the address of the simulated TiDB server that has the session."""
    with session.cursor() as cursor:
        cursor.execute("select @@hostname")
        row = cursor.fetchone()
    assert row is not None
    return str(row[0])


async def wait_until(description: str, is_true: Callable[[], Awaitable[bool]], timeout: float = 60.0) -> None:
    """Wait until `is_true()` is true. Fail with `description` after `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not await is_true():
        assert asyncio.get_running_loop().time() < deadline, f"waited {timeout:.0f} s for: {description}"
        await asyncio.sleep(0.2)


def choose_port(ports: Ports, usual: int) -> int:
    """Return the usual port, or another one if it is in use on this machine."""
    try:
        return ports.claim(usual)
    except PortTaken:
        return ports.allocate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def docker() -> AsyncIterator[Docker]:
    """Run a Docker daemon with the images. Afterwards check that it has left nothing behind."""
    cache = cache_directory("compose")
    network_interfaces = interfaces()
    async with docker_daemon(cache) as docker:
        await images.build_all(docker, cache)
        yield docker
    assert find_leftovers(docker.directory) == []
    assert interfaces() <= network_interfaces


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_stack(docker: Docker) -> AsyncIterator[Stack]:
    """Run the stack of docker-compose.yml. Afterwards check that it has left nothing behind."""
    with Ports() as ports:
        sql, api = choose_port(ports, 6000), choose_port(ports, 3080)
        env = {
            "TIDEVOY_SQL_PORT": str(sql),
            "TIDEVOY_API_PORT": str(api),
            "PROMETHEUS_PORT": str(choose_port(ports, 9090)),
            "GRAFANA_PORT": str(choose_port(ports, 3000)),
        }
        async with _up(docker, sql, api, env) as stack:
            yield stack


@asynccontextmanager
async def _up(docker: Docker, sql: int, api: int, env: dict[str, str]) -> AsyncIterator[Stack]:
    network_interfaces = interfaces()
    async with http_client(f"http://127.0.0.1:{api}") as rest:
        stack = Stack(docker, rest, sql, env)
        try:
            await stack.compose("up", "--detach", "--no-build", timeout=300.0)
            yield stack
        finally:
            # pytest prints this only if a test failed.
            print(await stack.compose("logs", "--no-color", "--tail=40"))
            # A timeout of 1 s suffices: test_stack_drains_and_scales checks that a server stops gracefully.
            await stack.compose("down", "--volumes", "--timeout=1", timeout=200.0)
    assert (await docker("ps", "--all", "--quiet")).split() == []
    assert (await docker("volume", "ls", "--quiet")).split() == []
    networks = await docker("network", "ls", "--format", "{{.Name}}")
    assert set(networks.split()) <= {"bridge", "host", "none"}
    assert interfaces() <= network_interfaces


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running_stack: Stack) -> Stack:
    """Yield the stack once clients reach all three servers through the published port."""
    await wait_until("three nodes are active", partial(_all_active, running_stack, NODES))
    # Before Envoy listens, Docker accepts connections to the published port and closes them.
    await wait_until("a server greets a client", partial(sends_mysql_greeting, running_stack.sql_port))
    await wait_until("all three get sessions", partial(_all_get_sessions, running_stack))
    return running_stack


async def test_server_restart_ends_no_session(stack: Stack) -> None:
    """The server is not drained: its sessions migrate because it announces its shutdown."""
    restarted = NODES[0]
    stop = asyncio.Event()
    async with run_stateful_sessions(stack.sql_port, SESSION_COUNT) as sessions:
        affected = [session for session in sessions if await session.node_address() == restarted]
        # One half sends statements. The other half sends nothing until the check at the end.
        working = sessions[: SESSION_COUNT // 2]
        assert {session in working for session in affected} == {True, False}
        before = await stack.started("tidb-0")
        async with asyncio.TaskGroup() as tasks:
            for session in working:
                tasks.create_task(session.run(stop))
            await stack.compose("restart", "tidb-0")
            stop.set()
        assert await stack.started("tidb-0") > before

        # Check at once, because sessions may return to the server when it is active again.
        counts_by_node = Counter([await session.node_address() for session in sessions])
        for session in sessions:
            await session.check()
        print(
            f"\n{len(affected)} of {SESSION_COUNT} sessions were on {restarted}; now {dict(counts_by_node)};"
            f" {sum(session.finished_turns for session in working)} turns,"
            f" slowest answer {max(session.max_latency_seconds for session in sessions) * 1000:.0f} ms"
        )
        assert set(counts_by_node) == set(NODES[1:])
        assert all(len(session.visited_nodes) > 1 for session in working if session in affected)
        await wait_until(
            "all migrations are counted", partial(_have_migrated, stack, restarted, len(affected))
        )
        await wait_until(f"{restarted} is active again", partial(_is, stack, restarted, "active"))
        await wait_until("new sessions get there", partial(_gets_sessions, stack, restarted))
        for session in sessions:
            await session.check()


async def test_certificate_is_created_once_and_is_private(stack: Stack) -> None:
    for node in (await stack.nodes()).values():
        assert node["migration_blockers"] == []
    servers = [name.partition(":")[0] for name in NODES]
    inspect_command = "cd /etc/tidb-session && stat -c '%a %u %n' . * && cat *"
    certificate_listing = await stack.compose("exec", "-T", "tidb-1", "sh", "-c", inspect_command)
    assert certificate_listing.splitlines()[:3] == ["700 0 .", "600 0 session.crt", "600 0 session.key"]
    with pytest.raises(CommandFailed, match="Read-only file system"):
        await stack.compose("exec", "-T", "tidb-1", "touch", "/etc/tidb-session/session.key")

    # Another `up` checks the certificate again, and restarts no server.
    before, first = await stack.started(*servers), await stack.started(CERTIFICATE)
    await stack.compose("up", "--detach", "--no-build")
    assert await stack.started(CERTIFICATE) > first
    assert await _is_healthy(stack, CERTIFICATE)
    assert await stack.started(*servers) == before
    assert await stack.compose("exec", "-T", "tidb-1", "sh", "-c", inspect_command) == certificate_listing


async def test_stack_drains_and_scales(stack: Stack) -> None:
    for service in images.services():
        await wait_until(f"{service} is healthy", partial(_is_healthy, stack, service))
    await _check_confinement(stack)

    sessions_by_node = await _one_session_on_each(stack)
    drained, stopped, fourth = NODES[1], NODES[2], "tidb-3:4000"
    try:
        # Drain a node by REST: it gets no new session, and its session migrates to another node.
        answer = await stack.rest.post(f"/v1/nodes/{drained}/drain", json={"deadline_seconds": 60})
        assert answer.status_code == 202, answer.text
        await wait_until("the drain is published", partial(_is, stack, drained, "draining"))
        await wait_until("Envoy acknowledged the drain", stack.is_acknowledged)
        assert drained not in await stack.count_new_sessions(30)
        assert "drained by an operator" in await stack.compose(
            "exec", "-T", "controlplane", "tidevoy", "nodes", "--json"
        )
        await wait_until(
            "its session has migrated", partial(_is_elsewhere, sessions_by_node[drained], drained)
        )

        # Start a fourth server, which is discovered through PD, and undrain the drained node.
        async with _run_server(stack, "tidb-3"):
            await wait_until("the fourth node is active", partial(_is, stack, fourth, "active"))
            await wait_until("the fourth node gets sessions", partial(_gets_sessions, stack, fourth))
            answer = await stack.rest.post(f"/v1/nodes/{drained}/undrain")
            assert answer.status_code == 202, answer.text
            await wait_until("the drained node gets sessions again", partial(_gets_sessions, stack, drained))

            # A server stops gracefully within its grace period. No old or new session fails meanwhile.
            stopping = asyncio.create_task(stack.compose("stop", stopped.partition(":")[0]))
            while not stopping.done():
                await stack.count_new_sessions(5)
            await stopping
            assert (await stack.container(stopped.partition(":")[0]))["State"]["ExitCode"] == 0
            for session in sessions_by_node.values():
                assert await _is_elsewhere(session, stopped)
    finally:
        for session in sessions_by_node.values():
            session.close()
        await stack.compose("start", stopped.partition(":")[0])


async def _one_session_on_each(stack: Stack) -> dict[str, pymysql.Connection[Any]]:
    sessions_by_node: dict[str, pymysql.Connection[Any]] = {}
    async with asyncio.timeout(60):
        while len(sessions_by_node) < len(NODES):
            session = await asyncio.to_thread(stack.connect)
            address = await asyncio.to_thread(node_of_session, session)
            if sessions_by_node.setdefault(address, session) is not session:
                session.close()
    return sessions_by_node


@asynccontextmanager
async def _run_server(stack: Stack, name: str) -> AsyncIterator[None]:
    """Run another TiDB server outside the compose file, as docs/operate/docker-compose.md describes."""
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
    return await asyncio.to_thread(node_of_session, session) != address


async def _have_migrated(stack: Stack, address: str, count: int) -> bool:
    results = await stack.migration_results(address)
    assert results["lost"] == 0
    return results["moved"] >= count


async def _all_get_sessions(stack: Stack) -> bool:
    return (await stack.count_new_sessions(10)).keys() == set(NODES)


async def _gets_sessions(stack: Stack, name: str) -> bool:
    return name in await stack.count_new_sessions(10)


async def _check_confinement(stack: Stack) -> None:
    """Check that our images run without root, without a writable root file system, without capabilities."""
    for service in ("controlplane", "envoy"):
        uid = await stack.compose("exec", "-T", service, "id", "-u")
        assert uid.strip() != "0"
        host = (await stack.container(service))["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        status = await stack.compose("exec", "-T", service, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status

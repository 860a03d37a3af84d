"""The stack of docker-compose.yml on a Docker daemon of its own."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pymysql
from prometheus_client.parser import text_string_to_metric_families

from sandbox.ports import Ports, PortTaken
from sandbox.server import http_client
from sandbox.tidb_binaries import TidbBinaries
from tests.support.cache import cache_directory
from tests.support.compose import images
from tests.support.compose.docker_daemon import Docker, docker_daemon, find_leftovers, interfaces

CERTIFICATE = "session-certificate"


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

    async def is_healthy(self, service: str) -> bool:
        """Return whether the container of `service` is healthy, or has created the certificate."""
        state = (await self.container(service))["State"]
        if service == CERTIFICATE:
            return bool(state["Status"] == "exited" and state["ExitCode"] == 0)
        return bool(state["Health"]["Status"] == "healthy")

    async def hostname(self, service: str) -> str:
        """Return the host name that a real server in the container of `service` reports to clients."""
        return str((await self.container(service))["Config"]["Hostname"])

    async def nodes(self) -> dict[str, dict[str, Any]]:
        answer = (await self.rest.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in answer.json()["nodes"]}

    async def state(self, address: str) -> str | None:
        return (await self.nodes()).get(address, {}).get("state")

    async def is_in_state(self, address: str, state: str) -> bool:
        return await self.state(address) == state

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

    async def gets_sessions(self, *hostnames: str) -> bool:
        """Return whether all these TiDB servers get some of ten new sessions."""
        return set(hostnames) <= (await self.count_new_sessions(10)).keys()

    def _node_of_new_session(self) -> str:
        with self.connect() as session:
            return node_of_session(session)


def node_of_session(session: pymysql.Connection[Any]) -> str:
    """Return the host name of the session's TiDB server. A simulated server reports its address."""
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


@asynccontextmanager
async def docker_with_images(servers: TidbBinaries | None = None) -> AsyncIterator[Docker]:
    """Run a Docker daemon with the images. Afterwards check that it has left nothing behind.

    The images of PD, TiKV and TiDB contain `servers`; by default, fake servers.
    """
    cache = cache_directory("compose")
    network_interfaces = interfaces()
    async with docker_daemon(cache) as docker:
        await images.build_all(docker, cache, servers)
        yield docker
    assert find_leftovers(docker.directory) == []
    assert interfaces() <= network_interfaces


@asynccontextmanager
async def run_stack(docker: Docker) -> AsyncIterator[Stack]:
    """Run the stack of docker-compose.yml. Afterwards check that it has left nothing behind."""
    with Ports() as ports:
        sql, api = _choose_port(ports, 6000), _choose_port(ports, 3080)
        env = {
            "TIDEVOY_SQL_PORT": str(sql),
            "TIDEVOY_API_PORT": str(api),
            "PROMETHEUS_PORT": str(_choose_port(ports, 9090)),
            "GRAFANA_PORT": str(_choose_port(ports, 3000)),
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
            try:
                # pytest prints this only if a test failed.
                print(await stack.compose("logs", "--no-color", "--tail=40"))
            finally:
                # A timeout of 1 s suffices: tests check that servers stop gracefully.
                await stack.compose("down", "--volumes", "--timeout=1", timeout=200.0)
    assert (await docker("ps", "--all", "--quiet")).split() == []
    volumes = (await docker("volume", "ls", "--quiet")).split()
    assert volumes == [], volumes
    networks = await docker("network", "ls", "--format", "{{.Name}}")
    assert set(networks.split()) <= {"bridge", "host", "none"}
    assert interfaces() <= network_interfaces


def _choose_port(ports: Ports, usual: int) -> int:
    """Return the usual port, or another one if it is in use on this machine."""
    try:
        return ports.claim(usual)
    except PortTaken:
        return ports.allocate()

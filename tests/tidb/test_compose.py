"""docker-compose.yml with real PD, store and TiDB servers.

Only `make soak` runs these tests, as building the images takes minutes.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial

import pymysql
import pytest
import pytest_asyncio

from sandbox.server import sends_mysql_greeting
from sandbox.tidb_binaries import TidbBinaries
from tests.support.compose import images
from tests.support.compose.docker_daemon import Docker
from tests.support.compose.server_restart import check_server_restart
from tests.support.compose.stack import Stack, docker_with_images, node_of_session, run_stack, wait_until
from tests.support.soak import SOAK
from tests.support.tidb.sessions import connect, query_rows, query_value

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.compose,
    pytest.mark.skipif(not SOAK, reason="building the images takes minutes: TIDEVOY_SOAK=1"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Docker daemon"),
]

SERVERS = ("tidb-0", "tidb-1", "tidb-2")
SESSION_COUNT = 30
PAGE = images.REPOSITORY / "docs/operate/docker-compose.md"
_START_SECONDS = 180.0
# The first test builds the images. The marker is not in `pytestmark`, because conftest.py's would precede it.
_with_builds = pytest.mark.timeout(2400)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def docker(tidb_bin: TidbBinaries) -> AsyncIterator[Docker]:
    """Run a Docker daemon whose images of PD, TiKV and TiDB contain real servers."""
    async with docker_with_images(tidb_bin) as daemon:
        yield daemon


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_stack(docker: Docker) -> AsyncIterator[Stack]:
    async with run_stack(docker) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running_stack: Stack) -> Stack:
    """Yield the stack once all three servers get sessions from Envoy."""
    await wait_until_serving(running_stack, SERVERS)
    return running_stack


async def wait_until_serving(stack: Stack, servers: tuple[str, ...]) -> None:
    """Wait until `servers` are active and each of them gets sessions."""
    # Before Envoy listens, Docker accepts connections to the published port and closes them.
    await wait_until(
        "a server greets a client", partial(sends_mysql_greeting, stack.sql_port), _START_SECONDS
    )
    for server in servers:
        active = partial(stack.is_in_state, f"{server}:4000", "active")
        await wait_until(f"{server} is active", active, _START_SECONDS)
    await wait_until("Envoy has the nodes", stack.is_acknowledged)
    hostnames = [await stack.hostname(server) for server in servers]
    await wait_until("all servers get sessions", partial(stack.gets_sessions, *hostnames))


async def tidevoy(stack: Stack, *arguments: str) -> str:
    """Run the command line in the control plane's container."""
    return await stack.compose("exec", "-T", "controlplane", "tidevoy", *arguments)


def commands_to_add_a_server() -> list[list[str]]:
    """Return the arguments of `docker` in the section "Add a TiDB server" of the documentation."""
    section = PAGE.read_text().partition("### Add a TiDB server")[2].partition("\n### ")[0]
    block = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`(docker (?:stop|rm) [^`]*)`", section)
    assert block is not None
    texts = [
        text.replace("\\\n", " ").replace("$PWD", str(images.REPOSITORY)) for text in (block[1], *inline)
    ]
    words = [shlex.split(text) for text in texts]
    assert [command[:2] for command in words] == [["docker", "run"], ["docker", "stop"], ["docker", "rm"]]
    return [command[1:] for command in words]


@_with_builds
async def test_stack_is_healthy_and_serves_sql(stack: Stack) -> None:
    for service in images.services():
        await wait_until(f"{service} is healthy", partial(stack.is_healthy, service), _START_SECONDS)
    with connect(stack.sql_port) as client:
        assert "Release Version:" in query_value(client, "select tidb_version()")
    nodes = await stack.nodes()
    assert nodes.keys() == {f"{server}:4000" for server in SERVERS}
    assert [node["migration_blockers"] for node in nodes.values()] == [[], [], []]


@_with_builds
async def test_server_restart_ends_no_session(stack: Stack) -> None:
    hostnames = {server: await stack.hostname(server) for server in SERVERS}
    await check_server_restart(stack, "tidb-0", hostnames, SESSION_COUNT)


@_with_builds
async def test_documented_command_adds_a_server(stack: Stack) -> None:
    """A server is added and stopped as docs/operate/docker-compose.md says."""
    run, stop, remove = commands_to_add_a_server()
    container = (await stack.docker(*run)).strip()
    try:
        await wait_until("it is active", partial(stack.is_in_state, "tidb-3:4000", "active"))
        assert re.search(r"^.*tidb-3:4000.*\bactive\b", await tidevoy(stack, "nodes"), re.MULTILINE)
        session = await session_on(stack, container[:12])
        with closing(session):
            query_rows(session, "set @mine = 7")
            await stack.docker(*stop, timeout=120.0)
            state = await stack.docker("inspect", "--format", "{{.State.ExitCode}}", container)
            assert int(state) == 0
            assert query_value(session, "select @mine") == 7
            assert node_of_session(session) in [await stack.hostname(server) for server in SERVERS]
        await stack.docker(*remove)
    finally:
        if container in await stack.docker("ps", "--all", "--quiet", "--no-trunc"):
            await stack.docker("rm", "--force", container)


async def session_on(stack: Stack, hostname: str) -> pymysql.Connection[pymysql.cursors.Cursor]:
    """Open sessions through Envoy until one is on this server."""
    async with asyncio.timeout(60):
        while True:
            session = await asyncio.to_thread(connect, stack.sql_port)
            if await asyncio.to_thread(node_of_session, session) == hostname:
                return session
            session.close()


@_with_builds
async def test_data_and_intents_outlive_the_containers(stack: Stack) -> None:
    with connect(stack.sql_port) as client:
        query_rows(client, "create database kept")
        query_rows(client, "create table kept.t (id int primary key, text varchar(20))")
        query_rows(client, "insert into kept.t values (1, 'before'), (2, 'down')")
    await tidevoy(stack, "drain", "tidb-1:4000", "--wait")

    # Every server stops within its grace period: Docker kills none.
    await stack.compose("stop", timeout=200.0)
    for service in ("pd", "tikv", *SERVERS, "controlplane", "envoy"):
        assert (await stack.container(service))["State"]["ExitCode"] == 0, service
    await stack.compose("down", timeout=200.0)
    await stack.compose("up", "--detach", "--no-build", timeout=300.0)

    await wait_until_serving(stack, ("tidb-0", "tidb-2"))
    await wait_until("it is still drained", partial(stack.is_in_state, "tidb-1:4000", "drained"))
    assert await stack.hostname("tidb-1") not in await stack.count_new_sessions(30)
    with connect(stack.sql_port) as client:
        assert query_rows(client, "select * from kept.t order by id") == [(1, "before"), (2, "down")]
    await tidevoy(stack, "undrain", "tidb-1:4000")
    await wait_until_serving(stack, SERVERS)

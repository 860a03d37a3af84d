"""docker-compose.yml on a Docker daemon that the tests start, with local images in place of upstream's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pymysql
import pytest
import pytest_asyncio

from sandbox.server import sends_mysql_greeting
from tests.support.compose import images
from tests.support.compose.commands import CommandFailed
from tests.support.compose.docker_daemon import Docker
from tests.support.compose.server_restart import check_server_restart
from tests.support.compose.stack import (
    CERTIFICATE,
    Stack,
    docker_with_images,
    node_of_session,
    run_stack,
    wait_until,
)

# Building the images takes minutes.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Docker daemon"),
]

NODES = ("tidb-0:4000", "tidb-1:4000", "tidb-2:4000")
SESSION_COUNT = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def docker() -> AsyncIterator[Docker]:
    """Run a Docker daemon with images of fake servers."""
    async with docker_with_images() as daemon:
        yield daemon


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_stack(docker: Docker) -> AsyncIterator[Stack]:
    async with run_stack(docker) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running_stack: Stack) -> Stack:
    """Yield the stack once clients reach all three servers through the published port."""
    await wait_until("three nodes are active", partial(_all_active, running_stack, NODES))
    # Before Envoy listens, Docker accepts connections to the published port and closes them.
    await wait_until("a server greets a client", partial(sends_mysql_greeting, running_stack.sql_port))
    await wait_until("all three get sessions", partial(running_stack.gets_sessions, *NODES))
    return running_stack


async def test_server_restart_ends_no_session(stack: Stack) -> None:
    """The server is not drained: its sessions migrate because it announces its shutdown."""
    hostnames = {name.partition(":")[0]: name for name in NODES}
    await check_server_restart(stack, "tidb-0", hostnames, SESSION_COUNT)


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
    assert await stack.is_healthy(CERTIFICATE)
    assert await stack.started(*servers) == before
    assert await stack.compose("exec", "-T", "tidb-1", "sh", "-c", inspect_command) == certificate_listing


async def test_stack_drains_and_scales(stack: Stack) -> None:
    for service in images.services():
        await wait_until(f"{service} is healthy", partial(stack.is_healthy, service))
    await _check_confinement(stack)

    sessions_by_node = await _one_session_on_each(stack)
    drained, stopped, fourth = NODES[1], NODES[2], "tidb-3:4000"
    try:
        # Drain a node by REST: it gets no new session, and its session migrates to another node.
        answer = await stack.rest.post(f"/v1/nodes/{drained}/drain", json={"deadline_seconds": 60})
        assert answer.status_code == 202, answer.text
        await wait_until("the drain is published", partial(stack.is_in_state, drained, "draining"))
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
            await wait_until("the fourth node is active", partial(stack.is_in_state, fourth, "active"))
            await wait_until("the fourth node gets sessions", partial(stack.gets_sessions, fourth))
            answer = await stack.rest.post(f"/v1/nodes/{drained}/undrain")
            assert answer.status_code == 202, answer.text
            await wait_until("the drained node gets sessions again", partial(stack.gets_sessions, drained))

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


async def test_stopped_envoy_ends_sessions_when_they_are_idle(stack: Stack) -> None:
    idle, in_transaction, *writers = [await asyncio.to_thread(stack.connect) for _ in range(6)]
    run_statement(idle, "create database if not exists stops")
    run_statement(idle, "create table stops.writes (writer int primary key, count int)")
    for writer in range(len(writers)):
        run_statement(idle, f"insert into stops.writes values ({writer}, 0)")
    idle.commit()
    run_statement(in_transaction, "begin")
    for session in writers:
        session.autocommit(True)
    writing = [
        asyncio.create_task(asyncio.to_thread(write_until_closed, session, writer))
        for writer, session in enumerate(writers)
    ]
    stopping = asyncio.create_task(stack.compose("stop", "envoy"))
    try:
        answered = await asyncio.gather(*writing)
        with pytest.raises(pymysql.OperationalError):
            await asyncio.to_thread(idle.ping, reconnect=False)
        # Their sessions have ended, but this one is in a transaction.
        assert not stopping.done()
        await asyncio.to_thread(run_statement, in_transaction, "insert into stops.writes values (100, 0)")
        await asyncio.to_thread(in_transaction.commit)
        await stopping
        state = (await stack.container("envoy"))["State"]
        assert state["ExitCode"] == 0
    finally:
        await asyncio.gather(stopping, *writing, return_exceptions=True)
        await stack.compose("start", "envoy")
    await wait_until("a server greets a client", partial(sends_mysql_greeting, stack.sql_port))
    with await asyncio.to_thread(stack.connect) as session:
        counts = run_statement(session, "select writer, count from stops.writes order by writer")
        run_statement(session, "drop database stops")
    # Each statement that ran was answered.
    assert counts == [*enumerate(answered), (100, 0)]


def run_statement(session: pymysql.Connection[Any], statement: str) -> list[tuple[Any, ...]]:
    with session.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def write_until_closed(session: pymysql.Connection[Any], writer: int) -> int:
    """Write until the session is closed. Return how many statements were answered."""
    count = 0
    with suppress(pymysql.OperationalError):
        while True:
            run_statement(session, f"update stops.writes set count = count + 1 where writer = {writer}")
            count += 1
    return count


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


async def _is_elsewhere(session: pymysql.Connection[Any], address: str) -> bool:
    return await asyncio.to_thread(node_of_session, session) != address


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

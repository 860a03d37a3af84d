"""An Envoy drains before it stops: on SIGTERM to its supervisor, and by `tidevoy envoys drain`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.server import accepts_connections, http_client, http_responds
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import CountingClient, counting_client, get_envoys, open_session, run_cluster
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

SHUTDOWN = 1053
WRITERS = 20
Work = Callable[[CountingClient, int], Coroutine[Any, Any, None]]


@asynccontextmanager
async def run_supervised(
    directory: Path, mariadb: MariaDb, *, wait: float = 0.0, timeout: float = 60.0
) -> AsyncIterator[tuple[LocalCluster, str]]:
    """Run a cluster whose Envoy has the supervisor. Yield it with the URL of the health port."""
    with Ports() as ports:
        health = f"127.0.0.1:{ports.allocate()}"
        settings: Mapping[str, Any] = {
            "envoy_health": {"listen": health},
            "end": {"wait": wait, "timeout": timeout},
        }
        async with run_cluster(directory, mariadb, settings=settings, supervised=True) as stack:
            yield stack, f"http://{health}"


async def begin(client: CountingClient) -> None:
    assert error_code(await client.query("begin")) == 0


async def start_statement(stack: LocalCluster, client: CountingClient, seconds: float) -> None:
    """Run a statement of this duration. Return when its node has begun to run it."""
    text = f"select sleep({seconds}) /* {id(client)} */"
    client.write_command(0x03, text.encode())
    await stack.wait_until(lambda: is_running(stack.mariadb, text), "the statement to run")


def run_sql(mariadb: MariaDb, *statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of the last statement."""
    with (
        pymysql.connect(unix_socket=str(mariadb.socket), user="root", autocommit=True) as connection,
        connection.cursor() as cursor,
    ):
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall())


def is_running(mariadb: MariaDb, text: str) -> bool:
    rows = run_sql(mariadb, "select info from information_schema.processlist")
    return any(row[0] == text for row in rows)


async def wait_until_closed(stack: LocalCluster) -> None:
    """Wait until the Envoy accepts no connections of clients."""

    async def is_closed() -> bool:
        return not await accepts_connections(stack.sql_port)

    await stack.wait_until(is_closed, "the port to close")


async def drain_under_load(directory: Path, mariadb: MariaDb, work: Work, done: Sequence[int]) -> None:
    """Drain an Envoy while a client per entry of `done` works, after each has done its work ten times.

    `work` works with a client of this index, until its session ends.
    """
    async with run_supervised(directory, mariadb) as (stack, _), AsyncExitStack() as clients:
        connected = [await open_session(clients, stack.sql_port) for _ in done]
        async with asyncio.TaskGroup() as group:
            for index, client in enumerate(connected):
                group.create_task(work(client, index))
            await wait_until(lambda: min(done) >= 10)
            stack.envoy.process.send_signal(signal.SIGTERM)
        assert await wait_for_exit(stack) == 0


async def wait_for_exit(stack: LocalCluster) -> int:
    async with asyncio.timeout(30):
        return await stack.envoy.process.wait()


async def test_sessions_end_when_they_are_idle(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_supervised(tmp_path, mariadb) as (stack, _), AsyncExitStack() as clients:
        idle, in_transaction, busy = [await open_session(clients, stack.sql_port) for _ in range(3)]
        await begin(in_transaction)
        await start_statement(stack, busy, 2)
        stack.envoy.process.send_signal(signal.SIGTERM)
        assert await idle.read_to_end() == b""  # a FIN, and no error
        await wait_until_closed(stack)
        assert error_code(await in_transaction.query("do 1")) == 0
        assert (await busy.read_packet())[1] == b"\1"  # the result has one column
        assert (await busy.read_to_end())[4:].startswith(b"\3def")
        assert error_code(await in_transaction.query("do 2")) == 0
        assert error_code(await in_transaction.query("commit")) == 0
        assert await in_transaction.read_to_end() == b""
        assert await wait_for_exit(stack) == 0
        assert "stopping Envoy: no client is left" in stack.envoy.process.output()


async def test_drain_of_a_node_does_not_wait_for_an_envoy_that_has_drained(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_supervised(tmp_path, mariadb) as (stack, _), AsyncExitStack() as clients:
        client = await open_session(clients, stack.sql_port)
        stack.envoy.process.send_signal(signal.SIGTERM)
        assert await client.read_to_end() == b""
        assert await wait_for_exit(stack) == 0
        (address, *_) = await stack.nodes()
        (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()

        async def is_drained() -> bool:
            return bool((await stack.nodes())[address]["state"] == "drained")

        await wait_until(is_drained)


async def test_client_that_reads_slowly_gets_its_whole_response(tmp_path: Path, mariadb: MariaDb) -> None:
    rows, size = 4, 8 << 20  # more than the buffers of the kernel and of Envoy
    row = f"select repeat('x', {size}) as y"
    async with run_supervised(tmp_path, mariadb) as (stack, _), AsyncExitStack() as clients:
        client = await open_session(clients, stack.sql_port)
        client.write_command(0x03, " union all ".join([row] * rows).encode())
        assert (await client.read_packet())[1] == b"\1"  # the response has begun, and has one column
        stack.envoy.process.send_signal(signal.SIGTERM)
        await wait_until_closed(stack)
        response = await client.read_to_end()
        assert response.count(b"x") == rows * size
        assert response[-5:-4] == b"\xfe"  # the packet that ends the rows
        assert await wait_for_exit(stack) == 0


async def test_new_clients_are_served_during_the_wait(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_supervised(tmp_path, mariadb, wait=3) as (stack, health), AsyncExitStack() as clients:
        before = await open_session(clients, stack.sql_port)
        async with http_client(health) as probe:
            assert (await probe.get("/readyz")).status_code == 200
            stack.envoy.process.send_signal(signal.SIGTERM)
            signalled_at = time.monotonic()

            async def is_not_ready() -> bool:
                return (await probe.get("/readyz")).text == "not ready: it is ending\n"

            await wait_until(is_not_ready)
        during = await open_session(clients, stack.sql_port)
        for client in (before, during):
            assert error_code(await client.query("do 1")) == 0
        assert time.monotonic() - signalled_at < 3, "this machine is too slow for this test"
        for client in (before, during):
            assert await client.read_to_end() == b""
        assert time.monotonic() - signalled_at >= 3
        assert await wait_for_exit(stack) == 0


async def test_sessions_that_are_left_are_closed_at_the_timeout(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_supervised(tmp_path, mariadb, timeout=2) as (stack, _), AsyncExitStack() as clients:
        in_transaction, busy = [await open_session(clients, stack.sql_port) for _ in range(2)]
        await begin(in_transaction)
        await start_statement(stack, busy, 60)
        stack.envoy.process.send_signal(signal.SIGTERM)
        assert await busy.read_to_end() == b""  # the statement may have run, so there is no error
        # The answer to the next command of the transaction, which does not run.
        assert error_code((await in_transaction.read_packet())[1]) == SHUTDOWN
        assert await wait_for_exit(stack) == 0


async def test_second_signal_stops_at_once(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_supervised(tmp_path, mariadb) as (stack, _), AsyncExitStack() as clients:
        await begin(await open_session(clients, stack.sql_port))
        stack.envoy.process.send_signal(signal.SIGTERM)
        await wait_until_closed(stack)
        stack.envoy.process.send_signal(signal.SIGTERM)
        assert await wait_for_exit(stack) == 0
        assert "stopping Envoy at once: a second signal has come" in stack.envoy.process.output()


async def test_no_statement_runs_without_an_answer(tmp_path: Path, mariadb: MariaDb, database: str) -> None:
    """Clients write all the time. Each statement either runs and is answered, or does not run."""
    rows = ", ".join(f"({writer}, 0)" for writer in range(WRITERS))
    table = f"{database}.writes"
    create = f"create table {table} (writer int primary key, count int)"
    run_sql(mariadb, create, f"insert into {table} values {rows}")

    answered = [0] * WRITERS  # by writer

    async def write(client: CountingClient, writer: int) -> None:
        """Write until the session ends."""
        text = f"update {table} set count = count + 1 where writer = {writer}"
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (code := error_code(await client.query(text))) == 0:
                answered[writer] += 1
            assert code == SHUTDOWN

    await drain_under_load(tmp_path, mariadb, write, answered)
    written = [row[0] for row in run_sql(mariadb, f"select count from {table} order by writer")]
    assert written == answered


async def test_statement_after_an_answered_ping_runs(tmp_path: Path, mariadb: MariaDb) -> None:
    """Pools validate a connection with COM_PING before they give it to the application."""
    uses = [0] * WRITERS

    async def use(client: CountingClient, index: int) -> None:
        """Use the session until a ping is not answered."""
        while True:
            try:
                response = await client.send_command(MySqlCommand.PING)
            except asyncio.IncompleteReadError:
                return
            assert error_code(response) == 0
            for _ in range(2):  # each in a transaction of its own
                assert error_code(await client.query("do 1")) == 0
            uses[index] += 1

    await drain_under_load(tmp_path, mariadb, use, uses)


async def test_operator_drains_an_envoy_and_ends_the_drain(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_supervised(tmp_path, mariadb) as (stack, health), AsyncExitStack() as clients:
        idle, in_transaction = [await open_session(clients, stack.sql_port) for _ in range(2)]
        await begin(in_transaction)
        url = stack.control_plane.api_url
        assert (await run_tidevoy(url, "envoys", "drain", "envoy-1")).stdout == "envoy-1 drains\n"
        assert await idle.read_to_end() == b""
        async with counting_client(stack.sql_port) as client:
            assert error_code((await client.read_packet())[1]) == SHUTDOWN
        async with http_client(health) as probe:
            assert (await probe.get("/readyz")).text == "not ready: it is ending\n"
        assert "; drain requested by an operator" in (await run_tidevoy(url, "envoys")).stdout
        assert error_code(await in_transaction.query("rollback")) == 0
        assert await in_transaction.read_to_end() == b""

        async def has_no_session() -> bool:
            return bool((await get_envoys(stack))["envoy-1"]["sessions"] == 0)

        await stack.wait_until(has_no_session, "no session")
        await run_tidevoy(url, "envoys", "ready", "envoy-1")
        await stack.wait_until(lambda: http_responds(f"{health}/readyz"), "the Envoy to be ready")
        await open_session(clients, stack.sql_port)


async def test_envoy_ends_with_its_supervisor_and_the_supervisor_with_its_envoy(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_supervised(tmp_path, mariadb) as (stack, _):
        (envoy,) = psutil.Process(stack.envoy.process.pid).children()
        await stack.envoy.process.kill()
        await stack.wait_until(lambda: not envoy.is_running(), "the Envoy to end")
        await stack.envoy.launch()
        (envoy,) = psutil.Process(stack.envoy.process.pid).children()
        envoy.kill()
        assert await wait_for_exit(stack) == 128 + signal.SIGKILL

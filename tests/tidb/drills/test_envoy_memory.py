"""Clients that do not read their results fill Envoy's heap up to `overload.max_heap_bytes`."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.server import http_client
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.soak import SOAK
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.logins import log_in
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_never, assert_nothing_received, wait_until
from tests.tidb.conftest import STACK_SETTINGS

MAX_HEAP_BYTES = (256 if SOAK else 64) << 20
OVERLOAD_SECONDS = 60.0 if SOAK else 5.0
_BASE_RSS_BYTES = 128 << 20
"""Memory that an Envoy takes in addition to its heap: its code, and free pages of the heap."""
_RESULT = (
    b"with recursive rows_ as (select 1 as n union all select n + 1 from rows_ where n < 900)"
    b" select repeat('x', 30000) from rows_"
)
"""27 MB, more than fits into the socket buffers between TiDB and client."""
_READ_LIMIT = 1024
"""asyncio stops reading from a socket when it has read twice as many bytes in advance."""
_READERS_AT_ONCE = 8
_MAX_READERS = 400


class Overload:
    """What Envoy's admin port says about its heap."""

    def __init__(self, stack: LocalCluster) -> None:
        self._envoy = stack.envoy

    async def is_active(self) -> bool:
        """Return whether Envoy has stopped accepting connections."""
        return bool(await self._gauge("overload_actions.stop_accepting_connections.active"))

    async def is_over(self) -> bool:
        return not await self.is_active()

    async def pressure(self) -> int:
        """Return the used part of the heap limit, in percent."""
        return await self._gauge("resource_monitors.fixed_heap.pressure")

    async def states_in_prometheus(self) -> list[str]:
        """Return the lines of Envoy's own metrics page for Prometheus about its heap limit."""
        page = (await self._envoy.get("/stats/prometheus?filter=overload")).text
        return [line for line in page.splitlines() if "fixed_heap_pressure{" in line]

    def rss(self) -> int:
        return int(psutil.Process(self._envoy.process.pid).memory_info().rss)

    async def _gauge(self, name: str) -> int:
        return (await self._envoy.stats(rf"^overload\.envoy\.{name}$"))[f"overload.envoy.{name}"]


def close(client: RawClient) -> None:
    """Close a connection. Until then, the argument keeps its reader: without it, asyncio drops all data."""
    client.writer.transport.abort()


async def start_reader(port: int, clients: ExitStack) -> None:
    """Let a client query a large result, of which it reads next to nothing."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port, limit=_READ_LIMIT))
    clients.callback(close, client)
    assert (await client.login())[0] == 0
    client.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + _RESULT))


async def fill_heap(stack: LocalCluster, overload: Overload, clients: ExitStack) -> int:
    """Add clients that do not read until Envoy stops accepting connections. Return their number."""
    for count in range(0, _MAX_READERS, _READERS_AT_ONCE):
        try:
            async with asyncio.timeout(2.0):
                for _ in range(_READERS_AT_ONCE):
                    await start_reader(stack.sql_port, clients)
        except TimeoutError:  # the login of this client waits, because Envoy does not accept it any more
            await wait_until(overload.is_active, 5.0)
        # The heap is checked four times a second.
        before = await overload.pressure()
        await asyncio.sleep(0.5)
        if await overload.is_active() and await overload.pressure() <= before:
            return count + _READERS_AT_ONCE
    raise AssertionError(f"{_MAX_READERS} clients do not fill the heap: {await overload.pressure()} %")


@pytest.mark.timeout(600 if SOAK else 120)
async def test_full_heap_delays_new_sessions_and_no_others(
    cluster: TidbCluster, tmp_path: Path, database: str, ports: Ports
) -> None:
    async def readiness() -> str:
        return (await balancer.get("/readyz")).text

    async def is_ready() -> bool:
        return await readiness() == "ready\n"

    health = f"127.0.0.1:{ports.allocate()}"
    settings = {
        **STACK_SETTINGS,
        "overload": {"max_heap_bytes": MAX_HEAP_BYTES},
        "envoy_health": {"listen": health},
    }
    async with (
        http_client(f"http://{health}") as balancer,
        LocalCluster.start(tmp_path, cluster=cluster, settings=settings) as stack,
        DrillLoad(stack.sql_port, database, clients=4, statements_per_second=40) as load,
        asyncio.TaskGroup() as tasks,
    ):
        overload = Overload(stack)
        idle_rss = overload.rss()
        assert await is_ready()  # the Envoy watches its heap for `/readyz` once it is probed
        with ExitStack() as clients:
            readers = await fill_heap(stack, overload, clients)
            new = RawClient(*await asyncio.open_connection("127.0.0.1", stack.sql_port))
            clients.callback(close, new)
            await assert_nothing_received(new.reader, OVERLOAD_SECONDS)
            assert await overload.is_active()
            assert await stack.envoy.is_live()
            assert await readiness() == "not ready: its memory is full (overload.max_heap_bytes)\n"
            pressure, rss = await overload.pressure(), overload.rss()
            metrics = await overload.states_in_prometheus()
            slowest_statement = await load.wait_for_statements()
            waiting = tasks.create_task(log_in(stack.sql_port))
            await assert_never(waiting.done, 0.5)
        freed_at = time.monotonic()
        await wait_until(overload.is_over)
        recovered = time.monotonic() - freed_at
        await wait_until(is_ready)
        close(await waiting)
        close(await log_in(stack.sql_port))
        await load.wait_for_statements()
        assert stack.violations() == []
        assert stack.bugs() == []
    print(
        f"\ndrill envoy_memory: limit {MAX_HEAP_BYTES >> 20} MiB; {readers} clients that do not read;"
        f" pressure {pressure} %, RSS {rss >> 20} MiB (idle {idle_rss >> 20} MiB); all sessions ran a"
        f" statement within {slowest_statement:.1f} s, {load.statements} in all, errors {load.errors};"
        f" accepts again {recovered:.2f} s after the clients left; {metrics}"
    )
    assert load.errors == []
    assert metrics
    assert rss < 1.25 * MAX_HEAP_BYTES + _BASE_RSS_BYTES

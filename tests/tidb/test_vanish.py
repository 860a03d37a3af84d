"""A real TiDB server whose packets are dropped: who is told so, how soon, and who goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from sandbox.stack import Stack
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster
from tests.awaiting import until
from tests.networks import drop_packets, own_network, pass_packets
from tests.tidb.operating import drain, undrain, until_state
from tests.tidb_sim_rig import Raw

pytestmark = pytest.mark.timeout(900)

RUNS = 20 if os.environ.get("TIDEVOY_SOAK") else 1
OUT_OF_SERVICE, TOLD = 5.0, 8.0
"""Seconds after the first dropped packet."""
SETTINGS = {"rebalance": {"enabled": False}}
"""So that each session stays where the test has put it."""
SOON = 1.5
"""Seconds that a login takes at most when it does not try a node that has vanished."""


@pytest.fixture
async def alone(tmp_path: Path, tidb_bin: TidbBinaries) -> AsyncIterator[Stack]:
    """Two TiDB servers, an Envoy and a control plane in a network of their own."""
    with own_network():
        async with (
            TidbCluster.start(tmp_path / "tidb", tidb_bin, nodes=2, graceful_wait=0.0) as cluster,
            Stack.start(tmp_path / "stack", cluster=cluster, settings=SETTINGS) as running,
        ):
            yield running
            assert "a bug:" not in running.envoy.process.output()


async def session(port: int) -> Raw:
    """A session of root."""
    client = Raw(*await asyncio.open_connection("127.0.0.1", port))
    assert (await client.login())[0] == 0
    return client


async def on(stack: Stack, node: Tidb) -> Raw:
    """A session through Envoy that is on this node."""
    while True:
        client = await session(stack.sql_port)
        if await client.rows("select @@port") == [(str(node.port),)]:
            return client
        client.writer.close()


async def error_of(client: Raw) -> str:
    """Code and text of the error that a session ends with."""
    _, payload = await client.packet()
    assert payload[0] == 0xFF, payload
    assert await client.reader.read() == b""
    return f"{int.from_bytes(payload[1:3], 'little')} {payload[9:].decode()}"


@dataclass(frozen=True)
class Times:
    """Seconds from the first dropped packet."""

    envoy: float
    """The Envoy gives the node no new sessions."""
    control_plane: float
    """`tidevoy nodes` does not say `active` any more."""
    waiting: float
    """A session that waits for an answer has an error that names the node."""
    idle: float
    """An idle session whose states are not known has ended."""
    saved: float
    """One whose states are known is on the other node."""
    login: float
    """The longest that any login took meanwhile."""


class Clock:
    """Seconds since now, and when what is awaited came."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.began

    async def of(self, what: Awaitable[Any]) -> tuple[float, Any]:
        result = await what
        return self(), result

    async def when(self, condition: Callable[[], Awaitable[bool]]) -> float:
        await until(condition)
        return self()


async def vanish(stack: Stack, lost: Tidb, other: Tidb) -> Times:
    """One run; behind it all is as it was."""
    known = await on(stack, other)
    await known.query("set @kept = 'as it was'")
    await known.query("use mysql")
    await drain(stack, other)
    await undrain(stack, other)
    waiting, idle = await on(stack, lost), await on(stack, lost)
    watcher = await session(other.port)
    waiting.writer.write(b"\x11\0\0\0\x03select sleep(60)")
    await asyncio.sleep(1.0)  # what is sent has arrived, and the last sign of the node is of any age
    drop_packets(lost.port, lost.status_port)
    clock = Clock()

    async def is_saved() -> bool:
        there = "select count(*) from information_schema.processlist where db = 'mysql'"
        return await watcher.rows(there) == [("1",)]

    async def is_ejected() -> bool:
        await asyncio.sleep(0.2)  # the thread of Envoy that answers is the one which is to find out
        page = (await stack.envoy.get("/stats/prometheus?filter=ejected_since")).text
        told = [line for line in page.splitlines() if lost.address in line and "vanished" in line]
        return any(not line.endswith(" 0") for line in told)

    async def is_out() -> bool:
        return (await stack.states())[lost.address] != "active"

    async def logins() -> float:
        longest = 0.0
        while clock() < TOLD:
            began = clock()
            (await session(stack.sql_port)).writer.close()
            longest = max(longest, clock() - began)
            await asyncio.sleep(0.1)
        return longest

    knocking = asyncio.create_task(logins())
    async with asyncio.TaskGroup() as tasks:
        ejected = tasks.create_task(clock.when(is_ejected))
        out = tasks.create_task(clock.when(is_out))
        answered = tasks.create_task(clock.of(error_of(waiting)))
        ended = tasks.create_task(clock.of(error_of(idle)))
        moved = tasks.create_task(clock.when(is_saved))
    assert answered.result()[1].startswith(f"2013 Tidevoy: lost connection to TiDB server {lost.address}")
    assert ended.result()[1].startswith(f"1053 Tidevoy: TiDB server {lost.address}")
    assert await known.rows("select @kept, @@port") == [("as it was", str(other.port))]
    longest = await knocking
    pass_packets()
    await until_state(stack, lost, "active")
    for client in (known, watcher, waiting, idle):
        client.writer.close()
    (await on(stack, lost)).writer.close()
    return Times(
        ejected.result(), out.result(), answered.result()[0], ended.result()[0], moved.result(), longest
    )


async def test_a_server_that_vanishes(alone: Stack) -> None:
    lost, other = alone.tidb
    runs = [await vanish(alone, lost, other) for _ in range(RUNS)]
    print()
    for field in fields(Times):
        values = [getattr(run, field.name) for run in runs]
        least, middle, most = min(values), statistics.median(values), max(values)
        print(f"{field.name:>14}: least {least:.2f}, median {middle:.2f}, most {most:.2f} s")
    for run in runs:
        assert max(run.envoy, run.control_plane) < OUT_OF_SERVICE
        assert max(run.waiting, run.idle, run.saved) < TOLD
        assert run.login < SOON

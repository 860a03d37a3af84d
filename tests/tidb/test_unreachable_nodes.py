"""Packets of a real TiDB server are dropped. Its clients soon get errors, or continue on another server.

TIDEVOY_SOAK=1 makes 20 runs instead of one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.network_namespace import drop_packets, network_namespace, stop_dropping_packets
from tests.support.soak import SOAK
from tests.support.tidb.node_operations import drain, undrain, wait_for_state
from tests.support.tidb.sessions import connect_directly, query_value
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until
from tests.tidb.conftest import STACK_SETTINGS

pytestmark = pytest.mark.timeout(900 if SOAK else 120)

RUNS = 20 if SOAK else 1
OUT_OF_SERVICE_SECONDS = 5.0
END_SECONDS = 8.0
"""OUT_OF_SERVICE_SECONDS and END_SECONDS count from the first dropped packet."""
LOGIN_SECONDS = 1.5
"""Maximal seconds for a login. A login must not try an unreachable node."""
_LOGIN_PAUSE_SECONDS = 0.1
"""Pause between two logins, which leaves CPU for the measured processes."""


@pytest.fixture
async def isolated_stack(tmp_path: Path, tidb_bin: TidbBinaries) -> AsyncIterator[LocalCluster]:
    """Run two TiDB servers, an Envoy and a control plane in a network namespace of their own."""
    with network_namespace():
        async with (
            TidbCluster.start(tmp_path / "tidb", tidb_bin, nodes=2, graceful_wait=0.0) as cluster,
            LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=STACK_SETTINGS) as running,
        ):
            yield running
            assert running.bugs() == []


async def open_session(port: int) -> RawClient:
    """Open a session of root."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    assert (await client.login())[0] == 0
    return client


async def open_session_on(stack: LocalCluster, node: Tidb) -> RawClient:
    """Open a session through Envoy that is on this node."""
    while True:
        client = await open_session(stack.sql_port)
        if await client.rows("select @@port") == [(str(node.port),)]:
            return client
        client.writer.close()


async def read_final_error(client: RawClient) -> str:
    """Return code and text of the error that ends a session."""
    _, payload = await client.read_packet()
    assert payload[0] == 0xFF, payload
    assert await client.reader.read() == b""
    return f"{int.from_bytes(payload[1:3], 'little')} {payload[9:].decode()}"


@dataclass(frozen=True)
class Times:
    """Seconds from the first dropped packet until an event."""

    envoy: float
    """Envoy gives the node no new sessions."""
    control_plane: float
    """`tidevoy nodes` no longer shows `active`."""
    waiting: float
    """A session that waits for an answer has received an error that names the node."""
    idle: float
    """An idle session without saved states has ended."""
    saved: float
    """An idle session with saved states is on the other node."""
    login: float
    """Duration of the longest login in the first END_SECONDS, not the time of an event."""


class Stopwatch:
    """Measures seconds from its creation."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.started_at

    async def time_of(self, awaited: Awaitable[Any]) -> tuple[float, Any]:
        result = await awaited
        return self(), result

    async def time_until(self, condition: Callable[[], Awaitable[bool]]) -> float:
        await wait_until(condition)
        return self()


async def run_scenario(stack: LocalCluster, lost: Tidb, other: Tidb, run: int) -> Times:
    """Run the scenario once. Afterwards the node is active again."""
    restorable = await open_session_on(stack, other)
    await restorable.query("set @kept = 'unchanged'")
    await restorable.query("use mysql")
    await drain(stack, other)
    await undrain(stack, other)
    waiting, idle = await open_session_on(stack, lost), await open_session_on(stack, lost)
    watcher = await open_session(other.port)
    # The server still executes the statements of earlier runs, so the text must differ.
    statement = f"select sleep(60), {run}"
    waiting.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + statement.encode()))
    with connect_directly(lost) as root:
        count = f"select count(*) from information_schema.processlist where info = '{statement}'"
        await wait_until(lambda: query_value(root, count) == 1)
    drop_packets(lost.port, lost.status_port)
    stopwatch = Stopwatch()

    async def is_saved() -> bool:
        query = "select count(*) from information_schema.processlist where db = 'mysql'"
        return await watcher.rows(query) == [("1",)]

    async def is_ejected() -> bool:
        page = (await stack.envoy.get("/stats/prometheus?filter=ejected_since")).text
        series = [line for line in page.splitlines() if lost.address in line and "vanished" in line]
        return any(not line.endswith(" 0") for line in series)

    async def is_inactive() -> bool:
        return (await stack.states())[lost.address] != "active"

    async def measure_logins() -> float:
        longest = 0.0
        while stopwatch() < END_SECONDS:
            started_at = stopwatch()
            (await open_session(stack.sql_port)).writer.close()
            longest = max(longest, stopwatch() - started_at)
            await asyncio.sleep(_LOGIN_PAUSE_SECONDS)
        return longest

    async with asyncio.TaskGroup() as tasks:
        longest = tasks.create_task(measure_logins())
        ejected = tasks.create_task(stopwatch.time_until(is_ejected))
        inactive = tasks.create_task(stopwatch.time_until(is_inactive))
        error_received = tasks.create_task(stopwatch.time_of(read_final_error(waiting)))
        ended = tasks.create_task(stopwatch.time_of(read_final_error(idle)))
        restored = tasks.create_task(stopwatch.time_until(is_saved))
    assert error_received.result()[1].startswith(
        f"2013 Tidevoy: lost connection to TiDB server {lost.address}"
    )
    assert ended.result()[1].startswith(f"1053 Tidevoy: TiDB server {lost.address}")
    assert await restorable.rows("select @kept, @@port") == [("unchanged", str(other.port))]
    stop_dropping_packets()
    await wait_for_state(stack, lost, "active")
    for client in (restorable, watcher, waiting, idle):
        client.writer.close()
    (await open_session_on(stack, lost)).writer.close()
    return Times(
        *(
            ejected.result(),
            inactive.result(),
            error_received.result()[0],
            ended.result()[0],
            restored.result(),
        ),
        longest.result(),
    )


async def test_unreachable_server_is_detected_in_time(isolated_stack: LocalCluster) -> None:
    lost, other = isolated_stack.tidb
    runs = [await run_scenario(isolated_stack, lost, other, run) for run in range(RUNS)]
    print()
    for field in fields(Times):
        values = [getattr(run, field.name) for run in runs]
        minimum, median, maximum = min(values), statistics.median(values), max(values)
        print(f"{field.name:>14}: minimum {minimum:.2f}, median {median:.2f}, maximum {maximum:.2f} s")
    for run in runs:
        assert max(run.envoy, run.control_plane) < OUT_OF_SERVICE_SECONDS
        assert max(run.waiting, run.idle, run.saved) < END_SECONDS
        assert run.login < LOGIN_SECONDS

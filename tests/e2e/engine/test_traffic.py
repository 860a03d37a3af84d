"""Traffic of sysbench and of short sessions while nodes join, leave or fail and parts of Tidevoy are killed.

Most tests run with Tidevoy's module in Envoy. Some run without it (see `without_module`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.sysbench import SysbenchLoad
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from sandbox.tidb import Tidb
from tests.support.e2e.sql_load import run_short_sessions
from tests.support.module.bootstrap import require_module

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

SESSIONS = 16  # Sessions of sysbench.
TRANSACTIONS_PER_SECOND = 48  # Of all sessions together.
SHORT_SLOW_START = {"balance": {"slow_start": 1}}  # Short, because the fixture `stack` waits for its end.

# With the module, the same events are covered by module/test_fleet.py, rolling restarts and rollouts.
without_module = pytest.mark.parametrize("filter_", ["none"])


@pytest.fixture
def filter_() -> str:
    """Return the Envoy's filter for tests that are not parametrized with it."""
    return "module"


@asynccontextmanager
async def run_stack(
    directory: Path, mariadb: MariaDb, filter_: str, **options: Any
) -> AsyncIterator[LocalCluster]:
    module = require_module() if filter_ == "module" else None
    async with LocalCluster.start(directory, mariadb=mariadb, module=module, **options) as stack:
        (envoy,) = (await stack.api.get("/v1/envoys")).json()["envoys"]
        assert envoy["filter"] == filter_
        yield stack
        violations = [line for node in stack.tidb for line in node.violations()]
        assert not violations


StartStack = Callable[[str], Awaitable[LocalCluster]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start_stack(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[StartStack]:
    """Yield a function that returns the shared cluster with a filter. The first call starts it."""
    stacks: dict[str, LocalCluster] = {}
    async with AsyncExitStack() as exit_stack:

        async def start(filter_: str) -> LocalCluster:
            if filter_ not in stacks:
                directory = tmp_path_factory.mktemp(filter_)
                stack = run_stack(directory, mariadb, filter_, settings=SHORT_SLOW_START)
                stacks[filter_] = await exit_stack.enter_async_context(stack)
            return stacks[filter_]

        yield start


@pytest_asyncio.fixture(loop_scope="module")
async def stack(start_stack: StartStack, filter_: str) -> LocalCluster:
    """Return the shared cluster with all parts running, all nodes in service, and equal weights."""
    shared_stack = await start_stack(filter_)
    for server in shared_stack.servers():
        if not server.is_running:
            await server.launch()
    for address, node in (await shared_stack.nodes()).items():
        if node["drain"] is not None:
            (await shared_stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
        (await shared_stack.api.patch(f"/v1/nodes/{address}", json={"weight": 100})).raise_for_status()
    await shared_stack.wait_until(lambda: _has_equal_nodes(shared_stack), "equal nodes", 30)
    return shared_stack


async def connections(node: Tidb) -> int:
    """Return how many clients the node itself counts."""
    async with http_client() as client:
        return int((await client.get(f"{node.status_url}/status")).json()["connections"])


async def is_acknowledged(stack: LocalCluster) -> bool:
    """Return whether every Envoy is connected and has acknowledged the last published version."""
    envoys = (await stack.api.get("/v1/envoys")).json()["envoys"]
    return bool(envoys) and all(
        envoy["connected_since"] is not None and envoy["acked_version"] == envoy["published_version"] != ""
        for envoy in envoys
    )


@without_module
async def test_drain_stops_new_sessions_and_keeps_existing_ones(
    stack: LocalCluster, sysbench_rows: int, tmp_path: Path
) -> None:
    node = stack.tidb[0]
    async with AsyncExitStack() as running_loads:
        sessions = SysbenchLoad(sysbench_rows, SESSIONS, rate=TRANSACTIONS_PER_SECOND)
        load = await running_loads.enter_async_context(sessions.running(stack.sql_port, tmp_path / "load"))
        await stack.wait_until(lambda: _all_connected(stack, SESSIONS), "all sessions of sysbench")
        assert await connections(node) >= 1
        short = await running_loads.enter_async_context(run_short_sessions(stack.sql_port))
        await short.wait_for_attempts(50)
        answer = await stack.api.post(f"/v1/nodes/{node.address}/drain", json={"deadline_seconds": 60})
        assert answer.status_code == 202
        await stack.wait_until(lambda: is_acknowledged(stack), "the Envoy's ACK")
        drained_at = time.monotonic()
        await short.wait_for_attempts(150)
        assert short.nodes(drained_at) == {n.port for n in stack.tidb[1:]}
        assert await connections(node) >= 1  # sysbench continues there
        await stack.wait_until(lambda: _has_counted_sessions(stack, node), "its sessions to be counted")
        node_view = (await stack.nodes())[node.address]
        assert (node_view["state"], node_view["eds_health"]) == ("draining", "DRAINING")
        counts = await load.stop()
        assert (counts.errors, counts.reconnects) == (0, 0)
        assert short.failures() == []
        await stack.wait_until(lambda: _is_in_state(stack, node, "drained"), "the node to be drained")
        assert (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).status_code == 202
        undrained_at = time.monotonic()
        await stack.wait_until(
            lambda: node.port in short.nodes(undrained_at), "new sessions on the node again"
        )


async def test_new_node_gets_sessions(stack: LocalCluster) -> None:
    async with run_short_sessions(stack.sql_port) as short:
        await short.wait_for_attempts(50)
        node = await stack.add_tidb()
        await short.wait_for_first_on(node.port, 10.0)
        assert short.failures() == []


@without_module
async def test_killed_node_ends_only_its_own_sessions(
    stack: LocalCluster, sysbench_rows: int, tmp_path: Path
) -> None:
    node = stack.tidb[1]
    async with AsyncExitStack() as running_loads:
        # One process per session, because sysbench ends when one of its sessions is lost.
        session = SysbenchLoad(sysbench_rows, threads=1, rate=TRANSACTIONS_PER_SECOND // SESSIONS)
        loads = await asyncio.gather(
            *(
                running_loads.enter_async_context(
                    session.running(stack.sql_port, tmp_path / f"load-{number}")
                )
                for number in range(SESSIONS)
            )
        )
        await stack.wait_until(lambda: _all_connected(stack, SESSIONS), "all sessions of sysbench")
        lost = await connections(node)
        assert lost >= 3
        async with run_short_sessions(stack.sql_port) as short:
            await short.wait_for_attempts(50)
            await node.kill()
            killed_at = time.monotonic()
            await short.wait_for_attempts(200)
            assert short.failures(since=killed_at) == []
            await stack.wait_until(lambda: _is_in_state(stack, node, "unhealthy"), "the node to be unhealthy")
        results = await asyncio.gather(*(load.stop() for load in loads), return_exceptions=True)
        assert [type(result) for result in results].count(ProcessFailed) == lost, results
    await node.launch()
    await stack.wait_until(lambda: _is_in_state(stack, node, "active"), "the node to be active again")


@without_module
async def test_graceful_stop_fails_no_new_session(tmp_path: Path, mariadb: MariaDb, filter_: str) -> None:
    async with (
        run_stack(tmp_path, mariadb, filter_, graceful_wait=4.0) as stack,
        run_short_sessions(stack.sql_port) as short,
    ):
        node = stack.tidb[2]
        await short.wait_for_attempts(100)
        node.process.send_signal(signal.SIGTERM)
        await stack.wait_until(
            lambda: _is_in_state(stack, node, "draining", "drained"), "the node to be draining", 3.0
        )
        node_view = (await stack.nodes())[node.address]
        assert "shutting down" in node_view["reason"]
        assert await node.process.wait() == 0
        await short.wait_for_attempts(100)
        await node.launch()
        await stack.wait_until(lambda: _is_in_state(stack, node, "active"), "the node to be active again")
        returned_at = time.monotonic()
        await stack.wait_until(lambda: node.port in short.nodes(returned_at), "sessions on the node again")
        assert short.failures() == []


@pytest.mark.parametrize(
    ("dead", "filter_"),
    [
        pytest.param(["control_plane"], "module", id="control_plane"),
        pytest.param(["etcd"], "module", id="etcd"),
        pytest.param(["control_plane", "etcd"], "none", id="control_plane+etcd"),
    ],
)
async def test_traffic_continues_without_control_plane_and_pd(
    stack: LocalCluster, sysbench_rows: int, tmp_path: Path, dead: list[str]
) -> None:
    drained, weighted = stack.tidb[0], stack.tidb[1]
    await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
    await stack.api.patch(f"/v1/nodes/{weighted.address}", json={"weight": 40})
    await stack.wait_until(lambda: _is_in_state(stack, drained, "drained"), "the node to be drained")
    before = await stack.nodes()
    processes = [getattr(stack, name) for name in dead]
    async with (
        SysbenchLoad(sysbench_rows, SESSIONS, rate=TRANSACTIONS_PER_SECOND).running(
            stack.sql_port, tmp_path / "load"
        ) as load,
        run_short_sessions(stack.sql_port) as short,
    ):
        for process in processes:
            await process.kill()
        killed_at = time.monotonic()
        await short.wait_for_attempts(150)
        counts = await load.stop()
        assert (counts.errors, counts.reconnects) == (0, 0)
        for process in reversed(processes):
            await process.launch()
        await stack.wait_until(lambda: is_acknowledged(stack), "the Envoy's ACK after the restart")
        await stack.wait_until(lambda: _is_unchanged(stack, before), "the state to be as before")
        await short.wait_for_attempts(100)
        assert short.failures() == []
        assert short.nodes(killed_at) == {n.port for n in stack.tidb[1:]}


async def test_control_plane_publishes_the_last_plan_while_pd_is_down(
    stack: LocalCluster,
) -> None:
    drained = stack.tidb[0]
    await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
    await stack.wait_until(lambda: _is_in_state(stack, drained, "drained"), "the node to be drained")
    before = await stack.nodes()
    for process in (stack.control_plane, stack.etcd, stack.envoy):
        await process.kill()
    await stack.control_plane.launch()
    await stack.envoy.launch()
    await stack.wait_until(lambda: _has_everything(stack), "a restarted Envoy to have everything", 5.0)
    await stack.wait_until(lambda: _is_unchanged(stack, before), "the state to be as before")
    async with run_short_sessions(stack.sql_port) as short:
        await short.wait_for_attempts(60)
        assert short.nodes(0.0) == {n.port for n in stack.tidb[1:]}
        assert short.failures() == []


async def test_restarted_envoy_is_configured(stack: LocalCluster) -> None:
    await stack.envoy.kill()
    await stack.envoy.launch()  # returns when its admin port answers
    await stack.wait_until(lambda: _has_everything(stack), "the Envoy to have everything", 10.0)
    async with run_short_sessions(stack.sql_port) as short:
        await short.wait_for_attempts(1)
        assert short.failures() == []


async def test_nack_is_reported_and_fails_no_session(tmp_path: Path, mariadb: MariaDb) -> None:
    """A second Envoy receives a listener on an address that this machine does not have."""
    async with run_stack(tmp_path / "stack", mariadb, "module") as stack:
        await check_nack(stack, tmp_path)


async def check_nack(stack: LocalCluster, tmp_path: Path) -> None:
    valid_settings = dict(stack.control_plane.settings)
    unusable = f"192.0.2.1:{stack.ports.allocate()}"
    stack.control_plane.settings = {**valid_settings, "sql": {"listen": unusable}}
    await stack.control_plane.prepare()
    reloaded = (await stack.api.post("/v1/config/reload")).json()
    assert reloaded["needs_new_envoys"] == ["sql.listen"]
    bootstrap = render_bootstrap(
        stack.control_plane.parsed_settings(),
        control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
        node_id="envoy-2",
        admin="127.0.0.1:0",
    )
    async with EnvoyProcess(bootstrap, tmp_path / "second"), run_short_sessions(stack.sql_port) as short:
        await stack.wait_until(lambda: _nacked(stack, "envoy-2"), "the NACK to be shown")
        envoys = {envoy["id"]: envoy for envoy in (await stack.api.get("/v1/envoys")).json()["envoys"]}
        assert unusable.partition(":")[0] in envoys["envoy-2"]["last_nack"]["message"]
        assert envoys["envoy-2"]["acked_version"] != envoys["envoy-2"]["published_version"]
        assert envoys["envoy-1"]["last_nack"] is None
        assert envoys["envoy-1"]["stale_resources"] == ["listener"]
        assert envoys["envoy-1"]["stale_settings"] == ["sql.listen"]
        await short.wait_for_attempts(50)
        assert short.failures() == []


async def _has_everything(stack: LocalCluster) -> bool:
    """Return whether the Envoy has its listener, which it requests after it has acknowledged the rest."""
    return await is_acknowledged(stack) and await stack.envoy.is_live()


async def _has_equal_nodes(stack: LocalCluster) -> bool:
    """Return whether all nodes are active and past their slow start, and the Envoys know it."""
    nodes = (await stack.nodes()).values()
    is_equal = {node["state"] for node in nodes} == {"active"} and (
        len({node["published_weight"] for node in nodes}) == 1
    )
    return is_equal and await is_acknowledged(stack)


async def _has_counted_sessions(stack: LocalCluster, node: Tidb) -> bool:
    return ((await stack.nodes())[node.address]["sessions"] or 0) >= 1


async def _all_connected(stack: LocalCluster, sessions: int) -> bool:
    return sum([await connections(node) for node in stack.tidb]) == sessions


async def _is_in_state(stack: LocalCluster, node: Tidb, *states: str) -> bool:
    return (await stack.states()).get(node.address) in states


async def _is_unchanged(stack: LocalCluster, before: dict[str, dict[str, Any]]) -> bool:
    """Return whether the nodes are the same as before, with unchanged states, settings and drains."""
    keys = ("state", "weight", "eds_health", "source", "labels", "drain")
    now = await stack.nodes()
    return now.keys() == before.keys() and all(
        now[address][key] == node[key] for address, node in before.items() for key in keys
    )


async def _nacked(stack: LocalCluster, envoy_id: str) -> bool:
    envoys = (await stack.api.get("/v1/envoys")).json()["envoys"]
    return any(envoy["id"] == envoy_id and envoy["last_nack"] for envoy in envoys)

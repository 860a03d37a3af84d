"""A local cluster: its parts restart after a kill, nodes join and leave, and failures are reported."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pymysql
import pytest
import pytest_asyncio

from sandbox.child_process import ProcessFailed
from sandbox.local_cluster import AdvertisedPorts, LocalCluster, WaitTimeout
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports

in_module = pytest.mark.asyncio(loop_scope="module")


def _query(stack: LocalCluster) -> object:
    connection = pymysql.connect(host="127.0.0.1", port=stack.sql_port, user="root", connect_timeout=10)
    with connection, connection.cursor() as cursor:
        cursor.execute("select 1")
        return cursor.fetchone()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_stack(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb
) -> AsyncIterator[LocalCluster]:
    async with LocalCluster.start(tmp_path_factory.mktemp("stack"), mariadb=mariadb) as cluster:
        yield cluster
        assert cluster.violations() == []


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running_stack: LocalCluster) -> LocalCluster:
    """Start the parts that an earlier test has killed. Return the cluster, which this file's tests share."""
    for part in running_stack.servers():
        if not part.is_running:
            await part.launch()
    return running_stack


@in_module
async def test_parts_restart_after_kill(stack: LocalCluster) -> None:
    before = await stack.states()
    assert list(before.values()) == ["active"] * 3
    for part in stack.servers():
        await part.kill()
        await part.restart()

    async def is_restored() -> bool:
        return await stack.states() == before and await stack.is_in_service(3)

    await stack.wait_until(is_restored, "the three nodes active again", 40.0)
    assert await asyncio.to_thread(_query, stack) == (1,)


@in_module
async def test_adds_and_removes_node(stack: LocalCluster) -> None:
    node = await stack.add_tidb("--label", "zone=a")

    async def is_active() -> bool:
        return (await stack.states()).get(node.address) == "active"

    await stack.wait_until(is_active, "the new node active")
    assert (await stack.nodes())[node.address]["labels"] == {"zone": "a"}
    assert await node.terminate() == 0

    async def has_left() -> bool:
        return (await stack.states()).get(node.address) not in ("active", "joining")

    await stack.wait_until(has_left, "the stopped node out of service")
    stack.tidb.remove(node)


async def test_settings_and_delta_reach_control_plane_and_envoy(tmp_path: Path, mariadb: MariaDb) -> None:
    settings: Mapping[str, object] = {"balance": {"slow_start": 0}, "pd": {"keyspace": None}}
    async with LocalCluster.start(tmp_path, nodes=1, mariadb=mariadb, settings=settings, delta=True) as stack:
        config = (await stack.api.get("/v1/config")).raise_for_status().json()
        assert config["balance"]["slow_start"] == 0
        assert config["pd"]["urls"] == [stack.etcd.url]
        assert (await stack.envoy.stats("^control_plane.connected_state$")) == {
            "control_plane.connected_state": 1
        }
        assert "DELTA_GRPC" in stack.envoy.bootstrap


@in_module
async def test_wait_timeout_reports_last_error(stack: LocalCluster) -> None:
    await stack.control_plane.kill()

    async def has_states() -> bool:
        return bool(await stack.states())

    with pytest.raises(WaitTimeout, match=r"^waited 0 s for: an answer \(ConnectError: "):
        await stack.wait_until(has_states, "an answer", timeout=0.2)
    with pytest.raises(WaitTimeout, match=r"^waited 0 s for: a condition that is never true$"):
        await stack.wait_until(lambda: False, "a condition that is never true", timeout=0.2)


@in_module
async def test_wait_for_first_failure_names_failed_part(stack: LocalCluster) -> None:
    failure_task = asyncio.create_task(stack.wait_for_first_failure())
    await stack.envoy.kill()
    failure = await failure_task
    assert isinstance(failure, ProcessFailed)
    assert str(failure).startswith("envoy was ended by SIGKILL; its last lines:\n")


async def test_failed_start_stops_started_parts(tmp_path: Path, ports: Ports, mariadb: MariaDb) -> None:
    advertised = AdvertisedPorts.allocate(ports)
    with (
        socket.create_server(("127.0.0.1", advertised.xds)),
        pytest.raises(ProcessFailed, match=f"^control-plane cannot start: port {advertised.xds} is taken"),
    ):
        async with LocalCluster.start(tmp_path, nodes=1, ports=ports, advertised=advertised, mariadb=mariadb):
            raise AssertionError("the cluster started")
    children = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert (tmp_path / "tidb-1.log").exists()
    assert not [line for line in children if str(tmp_path) in line]
    assert mariadb.is_running

"""Three real control planes on an etcd with PD's timings, with killed and suspended leaders."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from controlplane import address as addresses
from controlplane.etcd.client import EtcdClient
from sandbox.server import http_client
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy, healthy_node, register_node
from tests.support.controlplane.replicas import LEADER_CHANGE_SECONDS, ControlPlaneGroup
from tests.support.suspension import suspended
from tests.support.waiting import wait_until


async def node_state(planes: ControlPlaneGroup, name: str, address: str) -> str:
    """Return the node's state that a control plane shows, empty if the node is unknown."""
    for node in (await planes.get(name, "/v1/nodes"))["nodes"]:
        if node["address"] == address:
            return str(node["state"])
    return ""


async def wait_for_state_everywhere(planes: ControlPlaneGroup, address: str, expected: str) -> None:
    for name in planes.running_names:

        async def has_state(name: str = name) -> bool:
            return await node_state(planes, name, address) == expected

        await wait_until(has_state)


async def test_new_leader_takes_over_within_seconds(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with (
        ControlPlaneGroup(tmp_path) as planes,
        EtcdClient([planes.etcd.url]) as etcd,
        healthy_node() as (sql, status),
        healthy_node() as (other, other_status),
    ):
        await register_node(etcd, sql, status)
        await register_node(etcd, other, other_status)
        await planes.wait_for_leader()
        await wait_for_state_everywhere(planes, sql, "active")
        await wait_for_state_everywhere(planes, other, "active")
        response = await planes.post("b", f"/v1/nodes/{sql}/drain")
        assert response.status_code == 202
        await wait_for_state_everywhere(planes, sql, "drained")
        for _ in range(2):
            leader = await planes.wait_for_leader()
            survivor = next(name for name in planes.running_names if name != leader)
            port = addresses.split(planes.xds(survivor))[1]
            async with FakeEnvoy(port, f"envoy-at-{survivor}") as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: endpoints.keys() == {sql, other})
                await planes.kill(leader)
                killed_at = loop.time()
                # Writes succeed at any time, with or without a leader.
                response = await planes.post(survivor, f"/v1/nodes/{sql}/drain", {"deadline_seconds": 900})
                assert response.status_code == 202
                response = await planes.post(survivor, f"/v1/nodes/{sql}/drain")
                assert await planes.wait_for_leader() != leader
                assert loop.time() - killed_at < LEADER_CHANGE_SECONDS
                assert await node_state(planes, survivor, sql) in ("draining", "drained")
                await planes.restart(leader)
                await wait_for_state_everywhere(planes, sql, "drained")
                for endpoints in envoy.published:
                    assert endpoints[sql][0] == "DRAINING"
                    assert endpoints[other][0] == "HEALTHY"
        async with contextlib.AsyncExitStack() as envoys:
            for name in planes.running_names:
                port = addresses.split(planes.xds(name))[1]
                envoy = await envoys.enter_async_context(FakeEnvoy(port, f"envoy-at-{name}"))
                await envoy.wait_for_endpoints(bool)
            # All replicas publish the same version.
            views = (await planes.get("a", "/v1/envoys"))["envoys"]
            assert len({view["published_version"] for view in views if view["connected_since"]}) == 1

        async def all_registered() -> bool:
            return len((await planes.get("a", "/v1/replicas"))["replicas"]) == 3

        await wait_until(all_registered)
        output = await run_tidevoy(planes.url("a"), "replicas")
        assert (output.exit_code, output.stderr) == (0, "")
        assert sum("leader since" in line for line in output.stdout.splitlines()) == 1
        assert [line.split()[0] for line in output.stdout.splitlines()] == ["NAME", "a", "b", "c"]


async def test_suspended_leader_loses_leadership(tmp_path: Path) -> None:
    """The suspension may interrupt any operation, so PD must reject the late writes of the old leader."""
    async with (
        ControlPlaneGroup(tmp_path) as planes,
        EtcdClient([planes.etcd.url]) as etcd,
        healthy_node() as (sql, status),
    ):
        await register_node(etcd, sql, status)
        first = await planes.wait_for_leader()
        await wait_for_state_everywhere(planes, sql, "active")
        async with suspended(planes.control_planes[first].process.pid):

            async def another_leads() -> bool:
                replicas = (await planes.get(survivor, "/v1/replicas"))["replicas"]
                return any(replica["is_leader"] and replica["name"] != first for replica in replicas)

            survivor = next(name for name in planes.running_names if name != first)
            await wait_until(another_leads, LEADER_CHANGE_SECONDS)
        async with http_client(planes.url(first)) as client:
            lines = (await client.get("/metrics")).text.splitlines()
            assert "tidevoy_leader 0.0" in lines
        response = await planes.post(first, f"/v1/nodes/{sql}/drain")
        assert response.status_code == 202
        await wait_for_state_everywhere(planes, sql, "drained")

        async def has_rejoined_as_follower() -> bool:
            replicas = (await planes.get(first, "/v1/replicas"))["replicas"]
            leaders = [replica["name"] for replica in replicas if replica["is_leader"]]
            return len(replicas) == 3 and leaders != [first]

        await wait_until(has_rejoined_as_follower)

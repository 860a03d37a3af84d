"""Three real control planes on an etcd with PD's timings, of which one is killed, or stopped."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx2

from controlplane import address as addresses
from controlplane.etcd.client import EtcdClient
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy, healthy_node, register_node
from tests.support.controlplane.replicas import LEADER_CHANGE_SECONDS, ControlPlaneGroup, suspended
from tests.support.waiting import wait_until


async def state(planes: ControlPlaneGroup, name: str, address: str) -> str:
    """The state of a node as one control plane tells it; empty: it does not know it."""
    for each in (await planes.get(name, "/v1/nodes"))["nodes"]:
        if each["address"] == address:
            return str(each["state"])
    return ""


async def all_tell(planes: ControlPlaneGroup, address: str, expected: str) -> None:
    for name in planes.running_names:

        async def tells(name: str = name) -> bool:
            return await state(planes, name, address) == expected

        await wait_until(tells)


async def test_another_leads_within_seconds_whenever_the_leader_dies(tmp_path: Path) -> None:
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
        await all_tell(planes, sql, "active")
        await all_tell(planes, other, "active")
        answer = await planes.post("b", f"/v1/nodes/{sql}/drain")
        assert answer.status_code == 202
        await all_tell(planes, sql, "drained")
        for _ in range(2):
            leader = await planes.wait_for_leader()
            survivor = next(name for name in planes.running_names if name != leader)
            port = addresses.split(planes.xds(survivor))[1]
            async with FakeEnvoy(port, f"envoy-at-{survivor}") as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: endpoints.keys() == {sql, other})
                await planes.kill(leader)
                died = loop.time()
                # A write is good at any time, leader or not.
                answer = await planes.post(survivor, f"/v1/nodes/{sql}/drain", {"deadline_seconds": 900})
                assert answer.status_code == 202
                answer = await planes.post(survivor, f"/v1/nodes/{sql}/drain")
                assert await planes.wait_for_leader() != leader
                assert loop.time() - died < LEADER_CHANGE_SECONDS
                assert await state(planes, survivor, sql) in ("draining", "drained")
                await planes.restart(leader)
                await all_tell(planes, sql, "drained")
                for each in envoy.published:
                    assert each[sql][0] == "DRAINING"
                    assert each[other][0] == "HEALTHY"
        async with contextlib.AsyncExitStack() as envoys:
            for name in planes.running_names:
                port = addresses.split(planes.xds(name))[1]
                envoy = await envoys.enter_async_context(FakeEnvoy(port, f"envoy-at-{name}"))
                await envoy.wait_for_endpoints(bool)
            # Whoever serves an Envoy offers it the same.
            shown = (await planes.get("a", "/v1/envoys"))["envoys"]
            assert len({each["published_version"] for each in shown if each["connected_since"]}) == 1

        async def all_are_there() -> bool:
            return len((await planes.get("a", "/v1/replicas"))["replicas"]) == 3

        await wait_until(all_are_there)
        told = await run_tidevoy(planes.url("a"), "replicas")
        assert (told.exit_code, told.stderr) == (0, "")
        assert sum("leads since" in line for line in told.stdout.splitlines()) == 1
        assert [line.split()[0] for line in told.stdout.splitlines()] == ["NAME", "a", "b", "c"]


async def test_a_leader_that_was_stopped_leads_no_more(tmp_path: Path) -> None:
    """It may have been about to do anything when it was stopped: its writes are fenced off."""
    async with (
        ControlPlaneGroup(tmp_path) as planes,
        EtcdClient([planes.etcd.url]) as etcd,
        healthy_node() as (sql, status),
    ):
        await register_node(etcd, sql, status)
        first = await planes.wait_for_leader()
        await all_tell(planes, sql, "active")
        async with suspended(planes.control_planes[first].process):

            async def another_leads() -> bool:
                told = await planes.get(survivor, "/v1/replicas")
                return any(each["leads"] and each["name"] != first for each in told["replicas"])

            survivor = next(name for name in planes.running_names if name != first)
            await wait_until(another_leads, LEADER_CHANGE_SECONDS)
        async with httpx2.AsyncClient(base_url=planes.url(first), timeout=10.0) as client:
            lines = (await client.get("/metrics")).text.splitlines()
            assert "tidevoy_leader 0.0" in lines
        answer = await planes.post(first, f"/v1/nodes/{sql}/drain")
        assert answer.status_code == 202
        await all_tell(planes, sql, "drained")

        async def is_one_of_them_again() -> bool:
            told = (await planes.get(first, "/v1/replicas"))["replicas"]
            return len(told) == 3 and [each["name"] for each in told if each["leads"]] != [first]

        await wait_until(is_one_of_them_again)

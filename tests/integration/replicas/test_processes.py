"""Three real control planes on an etcd with PD's timings, of which one is killed, or stopped."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx2

from controlplane import address as addresses
from controlplane.etcd.client import EtcdClient
from tests.support.controlplane.cli_process import tidevoy
from tests.support.controlplane.engine import SimulatedEnvoy, node, register
from tests.support.controlplane.replicas import CHANGE, Planes, stopped
from tests.support.waiting import until


async def state(planes: Planes, name: str, address: str) -> str:
    """The state of a node as one control plane tells it; empty: it does not know it."""
    for each in (await planes.get(name, "/v1/nodes"))["nodes"]:
        if each["address"] == address:
            return str(each["state"])
    return ""


async def all_tell(planes: Planes, address: str, expected: str) -> None:
    for name in planes.alive:

        async def tells(name: str = name) -> bool:
            return await state(planes, name, address) == expected

        await until(tells)


async def test_another_leads_within_seconds_whenever_the_leader_dies(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with (
        Planes(tmp_path) as planes,
        EtcdClient([planes.etcd.url]) as etcd,
        node() as (sql, status),
        node() as (other, other_status),
    ):
        await register(etcd, sql, status)
        await register(etcd, other, other_status)
        await planes.leader()
        await all_tell(planes, sql, "active")
        await all_tell(planes, other, "active")
        answer = await planes.post("b", f"/v1/nodes/{sql}/drain")
        assert answer.status_code == 202
        await all_tell(planes, sql, "drained")
        for _ in range(2):
            leader = await planes.leader()
            survivor = next(name for name in planes.alive if name != leader)
            port = addresses.split(planes.xds(survivor))[1]
            async with SimulatedEnvoy(port, f"envoy-at-{survivor}") as envoy:
                await envoy.until(lambda endpoints: endpoints.keys() == {sql, other})
                await planes.kill(leader)
                died = loop.time()
                # A write is good at any time, leader or not.
                answer = await planes.post(survivor, f"/v1/nodes/{sql}/drain", {"deadline_seconds": 900})
                assert answer.status_code == 202
                answer = await planes.post(survivor, f"/v1/nodes/{sql}/drain")
                assert await planes.leader() != leader
                assert loop.time() - died < CHANGE
                assert await state(planes, survivor, sql) in ("draining", "drained")
                await planes.revive(leader)
                await all_tell(planes, sql, "drained")
                for each in envoy.published:
                    assert each[sql][0] == "DRAINING"
                    assert each[other][0] == "HEALTHY"
        async with contextlib.AsyncExitStack() as envoys:
            for name in planes.alive:
                port = addresses.split(planes.xds(name))[1]
                envoy = await envoys.enter_async_context(SimulatedEnvoy(port, f"envoy-at-{name}"))
                await envoy.until(bool)
            # Whoever serves an Envoy offers it the same.
            shown = (await planes.get("a", "/v1/envoys"))["envoys"]
            assert len({each["published_version"] for each in shown if each["connected_since"]}) == 1

        async def all_are_there() -> bool:
            return len((await planes.get("a", "/v1/replicas"))["replicas"]) == 3

        await until(all_are_there)
        told = await tidevoy(planes.url("a"), "replicas")
        assert (told.code, told.err) == (0, "")
        assert sum("leads since" in line for line in told.out.splitlines()) == 1
        assert [line.split()[0] for line in told.out.splitlines()] == ["NAME", "a", "b", "c"]


async def test_a_leader_that_was_stopped_leads_no_more(tmp_path: Path) -> None:
    """It may have been about to do anything when it was stopped: its writes are fenced off."""
    async with (
        Planes(tmp_path) as planes,
        EtcdClient([planes.etcd.url]) as etcd,
        node() as (sql, status),
    ):
        await register(etcd, sql, status)
        first = await planes.leader()
        await all_tell(planes, sql, "active")
        async with stopped(planes.planes[first].process):

            async def another_leads() -> bool:
                told = await planes.get(survivor, "/v1/replicas")
                return any(each["leads"] and each["name"] != first for each in told["replicas"])

            survivor = next(name for name in planes.alive if name != first)
            await until(another_leads, CHANGE)
        async with httpx2.AsyncClient(base_url=planes.url(first), timeout=10.0) as client:
            lines = (await client.get("/metrics")).text.splitlines()
            assert "tidevoy_leader 0.0" in lines
        answer = await planes.post(first, f"/v1/nodes/{sql}/drain")
        assert answer.status_code == 202
        await all_tell(planes, sql, "drained")

        async def is_one_of_them_again() -> bool:
            told = (await planes.get(first, "/v1/replicas"))["replicas"]
            return len(told) == 3 and [each["name"] for each in told if each["leads"]] != [first]

        await until(is_one_of_them_again)

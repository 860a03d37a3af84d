"""The plan on its way from the leader to Envoys of others, and what is believed of these on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.replicas.leader_election import Succession
from controlplane.replicas.lease import Lease
from controlplane.replicas.membership import Registry
from controlplane.storage.etcd_keys import Keys, Registered
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import SimulatedEnvoy, Told, becomes, node, register
from tests.support.controlplane.replicas import engines
from tests.support.waiting import until


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


def heeded(engine: Engine, envoy: str) -> set[str]:
    """The nodes of which an engine believes that this Envoy opens no new sessions there."""
    return set(engine.seen()[1].heeded.get(envoy, {}))


def acknowledged(engine: Engine) -> list[str]:
    """The Envoys of which an engine knows that they have the plan that they are offered."""
    return [view.status.id for view in engine.envoys() if view.status.endpoints_acked]


async def test_an_envoy_that_refuses_a_plan_is_not_believed_to_follow_it(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            async with SimulatedEnvoy(follower.xds_port, "envoy-2") as envoy:
                await envoy.until(lambda endpoints: sql in endpoints)
                for engine in (leader, follower):
                    await until(lambda engine=engine: acknowledged(engine) == ["envoy-2"])  # type: ignore[misc]
                envoy.refusal = "no"
                await leader.drain(sql)
                await until(lambda: bool(follower.envoys()[0].status.nacks))
                for engine in (leader, follower):
                    assert engine.node(sql).plan.state.value == "draining"
                    assert heeded(engine, "envoy-2") == set()
                envoy.refusal = ""
                await leader.amend(sql, labels={"a": "b"})
                await leader.undrain(sql)
                await leader.drain(sql)
                for engine in (leader, follower):
                    await until(lambda engine=engine: heeded(engine, "envoy-2") == {sql})  # type: ignore[misc]


async def test_a_plan_is_shared_also_when_the_lease_was_renewed_late(
    tmp_path: Path, etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PD decides by the term who may write, even if the leader's clock says that its lease is over."""
    steps = asyncio.Lock()
    step = Succession._step

    async def one_at_a_time(succession: Succession) -> None:
        async with steps:
            await step(succession)

    async def is_written() -> bool:
        return await client.get("/tidevoy/plan") is not None

    monkeypatch.setattr(Succession, "_step", one_at_a_time)
    async with engines(tmp_path, etcd) as (leader, _):
        await until(is_written)
        replicas, plan = leader._replicas, leader.seen()[0]
        assert replicas is not None
        async with steps:  # no step can find that the lease is over, so the leader keeps its term
            with monkeypatch.context() as late:
                late.setattr(Lease, "holds", False)
                assert replicas.term is None
                await client.delete("/tidevoy/plan")
                replicas.changed(plan, plan)
                await until(is_written)


async def test_who_asks_for_what_changes_no_plan_is_answered_at_once(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    loop = asyncio.get_running_loop()
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (_, follower):
            await becomes(follower, sql, "active")
            await follower.drain(sql)
            await becomes(follower, sql, "drained")
            began = loop.time()
            await follower.drain(sql, deadline_seconds=900)
            assert loop.time() - began < 1.0
            assert follower._planner._heeds == follower._intentions.version


async def test_that_a_removal_is_finished_is_not_told_as_taken_back(tmp_path: Path, etcd: Etcd) -> None:
    async with engines(tmp_path, etcd) as (leader, follower):
        await follower.add("10.0.0.1:4000")
        await follower.remove("10.0.0.1:4000")
        for engine in (leader, follower):
            await until(lambda engine=engine: not engine._intentions.now.added)  # type: ignore[misc]
        told = Told(follower)
        follower.note("test.end", "", "")
        await told.find("test.end")
        kinds = [event.kind for event in told.seen if event.kind.startswith("intent.")]
        assert kinds == ["intent.add", "intent.remove"]


async def test_who_could_not_register_in_time_does_later(etcd: Etcd, client: EtcdClient) -> None:
    now = 0.0
    keys, us = Keys("/tidevoy/"), Registered("us", "10.0.0.1:18000", "1", 1.0, "x")
    lease = Lease(client, 5, on_change=lambda: registry.register(), clock=lambda: now)
    registry = Registry(us, client, keys, lease, on_change=lambda _: None, tell=lambda *_: None)
    leased = asyncio.create_task(lease.run())
    await until(lambda: lease.holds)
    now = 100.0
    registering = asyncio.create_task(registry.run())
    await until(lambda: not registry._due.is_set())
    assert await client.get(keys.replica("us")) is None
    now = 0.0  # it has been renewed, and is the same lease

    async def is_there() -> bool:
        return await client.get(keys.replica("us")) is not None

    await until(is_there, 3)
    for task in (registering, leased):
        task.cancel()
    await asyncio.wait({registering, leased})
    await lease.give_back()

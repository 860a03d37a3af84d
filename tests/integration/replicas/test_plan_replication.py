"""The plan on its way from the leader to Envoys of others, and what is believed of these on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.replicas.leader_election import LeaderElection
from controlplane.replicas.lease import Lease
from controlplane.replicas.membership import Membership
from controlplane.storage.etcd_keys import EtcdKeys, ReplicaRecord
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    register_node,
    wait_for_state,
)
from tests.support.controlplane.replicas import run_engines
from tests.support.waiting import wait_until


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


def heeded(engine: Engine, envoy: str) -> set[str]:
    """The nodes of which an engine believes that this Envoy opens no new sessions there."""
    return set(engine.plan_and_facts()[1].closed_acks.get(envoy, {}))


def acknowledged(engine: Engine) -> list[str]:
    """The Envoys of which an engine knows that they have the plan that they are offered."""
    return [view.status.id for view in engine.envoys() if view.status.eds_acked]


async def test_an_envoy_that_refuses_a_plan_is_not_believed_to_follow_it(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            async with FakeEnvoy(follower.xds_port, "envoy-2") as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
                for engine in (leader, follower):
                    await wait_until(lambda engine=engine: acknowledged(engine) == ["envoy-2"])  # type: ignore[misc]
                envoy.nack_message = "no"
                await leader.drain(sql)
                await wait_until(lambda: bool(follower.envoys()[0].status.nacks))
                for engine in (leader, follower):
                    assert engine.node(sql).plan.state.value == "draining"
                    assert heeded(engine, "envoy-2") == set()
                envoy.nack_message = ""
                await leader.update(sql, labels={"a": "b"})
                await leader.undrain(sql)
                await leader.drain(sql)
                for engine in (leader, follower):
                    await wait_until(lambda engine=engine: heeded(engine, "envoy-2") == {sql})  # type: ignore[misc]


async def test_a_plan_is_shared_also_when_the_lease_was_renewed_late(
    tmp_path: Path, etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PD decides by the term who may write, even if the leader's clock says that its lease is over."""
    steps = asyncio.Lock()
    step = LeaderElection._step

    async def one_at_a_time(succession: LeaderElection) -> None:
        async with steps:
            await step(succession)

    async def is_written() -> bool:
        return await client.get("/tidevoy/plan") is not None

    monkeypatch.setattr(LeaderElection, "_step", one_at_a_time)
    async with run_engines(tmp_path, etcd) as (leader, _):
        await wait_until(is_written)
        replicas, plan = leader._replicas, leader.plan_and_facts()[0]
        assert replicas is not None
        async with steps:  # no step can find that the lease is over, so the leader keeps its term
            with monkeypatch.context() as late:
                late.setattr(Lease, "is_valid", False)
                assert replicas.term is None
                await client.delete("/tidevoy/plan")
                replicas.notify_plan_changed(plan, plan)
                await wait_until(is_written)


async def test_who_asks_for_what_changes_no_plan_is_answered_at_once(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    loop = asyncio.get_running_loop()
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (_, follower):
            await wait_for_state(follower, sql, "active")
            await follower.drain(sql)
            await wait_for_state(follower, sql, "drained")
            began = loop.time()
            await follower.drain(sql, deadline_seconds=900)
            assert loop.time() - began < 1.0
            assert follower._planner._applied_intents_version == follower._intents.version


async def test_that_a_removal_is_finished_is_not_told_as_taken_back(tmp_path: Path, etcd: Etcd) -> None:
    async with run_engines(tmp_path, etcd) as (leader, follower):
        await follower.add("10.0.0.1:4000")
        await follower.remove("10.0.0.1:4000")
        for engine in (leader, follower):
            await wait_until(lambda engine=engine: not engine._intents.current.added)  # type: ignore[misc]
        told = EventRecorder(follower)
        follower.record_event("test.end", "", "")
        await told.wait_for("test.end")
        kinds = [event.kind for event in told.recorded if event.kind.startswith("intent.")]
        assert kinds == ["intent.add", "intent.remove"]


async def test_who_could_not_register_in_time_does_later(etcd: Etcd, client: EtcdClient) -> None:
    now = 0.0
    keys, us = EtcdKeys("/tidevoy/"), ReplicaRecord("us", "10.0.0.1:18000", "1", 1.0, "x")
    lease = Lease(client, 5, on_change=lambda: registry.request_registration(), clock=lambda: now)
    registry = Membership(us, client, keys, lease, on_change=lambda _: None, emit=lambda *_: None)
    leased = asyncio.create_task(lease.run())
    await wait_until(lambda: lease.is_valid)
    now = 100.0
    registering = asyncio.create_task(registry.run())
    await wait_until(lambda: not registry._registration_due.is_set())
    assert await client.get(keys.replica("us")) is None
    now = 0.0  # it has been renewed, and is the same lease

    async def is_there() -> bool:
        return await client.get(keys.replica("us")) is not None

    await wait_until(is_there, 3)
    for task in (registering, leased):
        task.cancel()
    await asyncio.wait({registering, leased})
    await lease.revoke()

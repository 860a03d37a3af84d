"""Replication of the leader's plan to Envoys of other replicas, and their acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.replicas.leader_election import LeaderElection
from controlplane.replicas.lease import Lease
from controlplane.replicas.membership import Membership
from controlplane.storage.etcd_keys import EtcdKeys, ReplicaRecord
from controlplane.storage.etcd_store import EtcdStore
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


def closed_nodes(engine: Engine, envoy: str) -> set[str]:
    """Return the nodes that the Envoy has acknowledged as closed, according to an engine."""
    return set(engine.cluster.facts.closed_acks.get(envoy, {}))


def envoys_up_to_date(engine: Engine) -> list[str]:
    """Return the Envoys that have acknowledged the current endpoints, according to an engine."""
    return [view.status.id for view in engine.cluster.envoys() if view.status.has_acknowledged_endpoints]


async def test_rejected_plan_does_not_count_as_applied(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            async with FakeEnvoy(follower.xds_port, "envoy-2") as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
                for engine in (leader, follower):
                    await wait_until(lambda engine=engine: envoys_up_to_date(engine) == ["envoy-2"])  # type: ignore[misc]
                envoy.nack_message = "no"
                await leader.operations.drain(sql)
                await wait_until(lambda: bool(follower.cluster.envoys()[0].status.nacks))
                for engine in (leader, follower):
                    assert engine.cluster.node(sql).plan.state.value == "draining"
                    assert closed_nodes(engine, "envoy-2") == set()
                envoy.nack_message = ""
                await leader.operations.update(sql, labels={"a": "b"})
                await leader.operations.undrain(sql)
                await leader.operations.drain(sql)
                for engine in (leader, follower):
                    await wait_until(lambda engine=engine: closed_nodes(engine, "envoy-2") == {sql})  # type: ignore[misc]


async def test_plan_is_written_despite_a_late_lease_renewal(
    tmp_path: Path, etcd: Etcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose lease renewal is late still writes its plan, because etcd checks the leader's term."""
    step_lock = asyncio.Lock()
    original_step = LeaderElection._step

    async def locked_step(election: LeaderElection) -> None:
        async with step_lock:
            await original_step(election)

    async def is_plan_written() -> bool:
        return await client.get("/tidevoy/plan") is not None

    monkeypatch.setattr(LeaderElection, "_step", locked_step)
    async with run_engines(tmp_path, etcd) as (leader, _):
        await wait_until(is_plan_written)
        replicas, plan = leader._replicas, leader.cluster.plan
        assert replicas is not None
        async with step_lock:  # no election step detects the expired lease, so the leader keeps its term
            with monkeypatch.context() as patch:
                patch.setattr(Lease, "is_valid", False)
                assert replicas.valid_term is None
                await client.delete("/tidevoy/plan")
                replicas.notify_plan_changed(plan, plan, is_urgent=True)
                await wait_until(is_plan_written)


async def test_intent_without_plan_change_is_applied_at_once(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    loop = asyncio.get_running_loop()
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (_, follower):
            await wait_for_state(follower, sql, "active")
            await follower.operations.drain(sql)
            await wait_for_state(follower, sql, "drained")
            start = loop.time()
            await follower.operations.drain(sql, deadline_seconds=900)
            assert loop.time() - start < 1.0
            assert follower._planner._generation.intents_version == follower._intents.version


async def test_completed_removal_emits_no_cancel_event(tmp_path: Path, etcd: Etcd) -> None:
    async with run_engines(tmp_path, etcd) as (leader, follower):
        await follower.operations.add("10.0.0.1:4000")
        await follower.operations.remove("10.0.0.1:4000")
        for engine in (leader, follower):
            await wait_until(lambda engine=engine: not engine._intents.current.added)  # type: ignore[misc]
        recorder = EventRecorder(follower)
        follower.events.emit("test.end", "", "")
        await recorder.wait_for("test.end")
        kinds = [event.kind for event in recorder.recorded if event.kind.startswith("intent.")]
        assert kinds == ["intent.add", "intent.remove"]


async def test_late_registration_is_retried(etcd: Etcd, client: EtcdClient) -> None:
    now = 0.0
    keys = EtcdKeys("/tidevoy/")
    own_record = ReplicaRecord(name="us", address="10.0.0.1:18000", version="1", since=1.0, instance="x")
    lease = Lease(client, 5, on_change=lambda: membership.request_registration(), clock=lambda: now)
    store = cast(EtcdStore, SimpleNamespace(client=client, keys=keys))
    membership = Membership(own_record, store, lease, on_change=lambda _: None, emit=lambda *_: None)
    lease_task = asyncio.create_task(lease.run())
    await wait_until(lambda: lease.is_valid)
    now = 100.0
    membership_task = asyncio.create_task(membership.run())
    await wait_until(lambda: not membership._registration_due.is_set())
    assert await client.get(keys.replica("us")) is None
    now = 0.0  # as if the lease had been renewed

    async def is_registered() -> bool:
        return await client.get(keys.replica("us")) is not None

    await wait_until(is_registered, 3)
    for task in (membership_task, lease_task):
        task.cancel()
    await asyncio.wait({membership_task, lease_task})
    await lease.revoke()

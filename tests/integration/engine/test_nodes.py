"""Nodes from etcd: registration, publishing, lost registrations, failures and PD outages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import State
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    register_node,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until


@pytest.fixture
async def pd(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


@contextlib.asynccontextmanager
async def engine_with_node(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient, **sections: object
) -> AsyncIterator[tuple[Engine, str]]:
    """Run an engine with one active node from PD; yield the engine and the node's address."""
    async with healthy_node() as (sql, status):
        await register_node(pd, sql, status)
        async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]}, **sections)) as engine:
            await wait_for_state(engine, sql, "active")
            yield engine, sql


async def test_registered_node_is_published_at_once(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with (
        run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine,
        FakeEnvoy(engine.xds_port) as envoy,
    ):
        await envoy.wait_for_endpoints(lambda endpoints: endpoints == {})
        latencies = []
        for _ in range(3):
            async with healthy_node() as (sql, status):
                start = time.monotonic()
                await register_node(pd, sql, status)
                await envoy.wait_for_endpoints(lambda endpoints, sql=sql: sql in endpoints)  # type: ignore[misc]
                latencies.append(time.monotonic() - start)
                assert engine.cluster.node(sql).plan.state is State.ACTIVE
        assert min(latencies) < 0.3, latencies
        assert max(latencies) < 5.0, latencies


async def test_invalid_entries_do_not_affect_other_nodes(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with engine_with_node(tmp_path, etcd, pd) as (engine, sql):
        invalid_entries = {
            "/topology/tidb/10.0.0.1:4000/info": b"{not json",
            "/topology/tidb/10.0.0.2:4000/info": b'{"start_timestamp": NaN, "ip": "1.2.3.4"}',
            "/topology/tidb/10.0.0.3:4000/info": b'{"version": "\\ud800"}',
            "/topology/tidb/10.0.0.4:4000/info": b"[" * 100_000,
            "/topology/tidb/no-port/info": b"{}",
        }
        for key, value in invalid_entries.items():
            await pd.put(key, value)
        await wait_until(
            lambda: (
                {problem.subject for problem in engine.cluster.topology_problems()} >= invalid_entries.keys()
            )
        )
        event = await EventRecorder(engine).wait_for("source.problem")
        assert "is ignored" in event.message
        assert [view.plan.node.address for view in engine.cluster.nodes()] == [sql]
        assert engine.cluster.node(sql).plan.state is State.ACTIVE


async def test_node_without_ttl_drains_after_the_grace_period(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    grace = {"registration_grace": 1.0}
    async with (
        engine_with_node(tmp_path, etcd, pd, drain=grace) as (engine, sql),
        FakeEnvoy(engine.xds_port) as envoy,
        healthy_node() as (other, status),
    ):
        await register_node(pd, other, status)  # otherwise the panic threshold keeps the last node in service
        await wait_for_state(engine, other, "active")
        envoy.sessions[sql] = 1
        start = time.monotonic()
        await pd.delete(f"/topology/tidb/{sql}/ttl")
        await wait_until(lambda: "tolerated for 1 s" in engine.cluster.node(sql).plan.reason)
        assert engine.cluster.node(sql).plan.state is State.ACTIVE
        await wait_for_state(engine, sql, "draining")
        assert time.monotonic() - start >= 1.0
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
        await pd.put(f"/topology/tidb/{sql}/ttl", b"1")
        await wait_for_state(engine, sql, "active")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "HEALTHY")


async def test_unregistered_node_is_deleted_after_its_last_session(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with engine_with_node(tmp_path, etcd, pd) as (engine, sql), healthy_node() as (other, status):
        await register_node(pd, other, status)
        await wait_for_state(engine, other, "active")
        async with FakeEnvoy(engine.xds_port) as envoy:
            envoy.sessions[sql] = 2
            await wait_until(lambda: engine.cluster.node(sql).sessions == 2)
            await pd.delete(f"/topology/tidb/{sql}/", prefix=True)
            await wait_for_state(engine, sql, "gone")
            await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
            await wait_for_plans(engine, 2)
            assert engine.cluster.node(sql).plan.state is State.GONE
            envoy.sessions.clear()
            await wait_for_state(engine, sql, None)
            await envoy.wait_for_endpoints(lambda endpoints: sql not in endpoints)
            forgotten = await EventRecorder(engine).wait_for("node.forgotten")
            assert forgotten.subject == sql


async def test_dead_node_becomes_unhealthy(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with engine_with_node(tmp_path, etcd, pd) as (engine, healthy), FakeEnvoy(engine.xds_port) as envoy:
        async with healthy_node() as (sql, status):
            await register_node(pd, sql, status)
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
        await wait_for_state(engine, sql, "unhealthy")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[healthy][0] == "HEALTHY"
        assert "refuse" in engine.cluster.node(sql).plan.reason


async def test_node_that_never_passes_a_check_is_never_published(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with engine_with_node(tmp_path, etcd, pd) as (engine, sql), FakeEnvoy(engine.xds_port) as envoy:
        with refusing_port() as dead:
            await register_node(pd, dead, dead)
            await wait_for_state(engine, dead, "joining")
            await wait_until(lambda: engine.cluster.node(dead).health.sql is not None)
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
            assert dead not in envoy.endpoints
            await pd.delete(f"/topology/tidb/{dead}/", prefix=True)
            await wait_for_state(engine, dead, None)


async def test_pd_outage_changes_nothing_for_envoys(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with engine_with_node(tmp_path, etcd, pd) as (engine, sql), FakeEnvoy(engine.xds_port) as envoy:
        await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
        before = len(envoy.published)
        recorder = EventRecorder(engine)
        await etcd.kill()
        await recorder.wait_for("source.outage", 30)
        assert engine.readiness_problems() == []
        assert len(envoy.published) == before
        await etcd.restart()
        await recorder.wait_for("source.recovered", 30)
        assert engine.cluster.node(sql).plan.state is State.ACTIVE
        assert len(envoy.published) == before


async def test_node_that_dies_during_a_pd_outage_becomes_unhealthy(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    """The last known registration stays valid during the outage, so only the checks detect the failure."""
    async with engine_with_node(tmp_path, etcd, pd) as (engine, healthy), FakeEnvoy(engine.xds_port) as envoy:
        recorder = EventRecorder(engine)
        async with healthy_node() as (sql, status):
            await register_node(pd, sql, status)
            await wait_for_state(engine, sql, "active")
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
            await etcd.kill()
            await recorder.wait_for("source.outage", 30)
            assert engine.cluster.node(sql).plan.state is State.ACTIVE
        await wait_for_state(engine, sql, "unhealthy")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[healthy][0] == "HEALTHY"
        assert "refuse" in engine.cluster.node(sql).plan.reason
        assert not etcd.is_running

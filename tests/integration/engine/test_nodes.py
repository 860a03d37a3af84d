"""Nodes come from etcd, are served, fall silent and leave; Envoys say how many sessions they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import State
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    UNREACHABLE_PD_URL,
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    register_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until


@pytest.fixture
async def pd(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


@contextlib.asynccontextmanager
async def one_node(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient, **sections: object
) -> AsyncIterator[tuple[Engine, str]]:
    """An engine with one active node from PD."""
    async with healthy_node() as (sql, status):
        await register_node(pd, sql, status)
        async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]}, **sections)) as engine:
            await wait_for_state(engine, sql, "active")
            yield engine, sql


async def test_a_node_that_registers_is_published_at_once(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with (
        run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine,
        FakeEnvoy(engine.xds_port) as envoy,
    ):
        await envoy.wait_for_endpoints(lambda endpoints: endpoints == {})
        took = []
        for _ in range(3):
            async with healthy_node() as (sql, status):
                began = time.monotonic()
                await register_node(pd, sql, status)
                await envoy.wait_for_endpoints(lambda endpoints, sql=sql: sql in endpoints)  # type: ignore[misc]
                took.append(time.monotonic() - began)
                assert engine.node(sql).plan.state is State.ACTIVE
        assert min(took) < 0.3, took
        assert max(took) < 5.0, took


async def test_an_entry_that_makes_no_sense_harms_nobody_else(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql):
        bad = {
            "/topology/tidb/10.0.0.1:4000/info": b"{not json",
            "/topology/tidb/10.0.0.2:4000/info": b'{"start_timestamp": NaN, "ip": "1.2.3.4"}',
            "/topology/tidb/10.0.0.3:4000/info": b'{"version": "\\ud800"}',
            "/topology/tidb/10.0.0.4:4000/info": b"[" * 100_000,
            "/topology/tidb/no-port/info": b"{}",
        }
        for key, value in bad.items():
            await pd.put(key, value)
        await wait_until(lambda: {problem.subject for problem in engine.topology_problems()} >= bad.keys())
        event = await EventRecorder(engine).wait_for("source.problem")
        assert "is left out" in event.message
        assert [view.plan.node.address for view in engine.nodes()] == [sql]
        assert engine.node(sql).plan.state is State.ACTIVE


async def test_ttl_lost_is_borne_for_the_grace_and_then_drains(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    grace = {"registration_grace": 1.0}
    async with (
        one_node(tmp_path, etcd, pd, drain=grace) as (engine, sql),
        FakeEnvoy(engine.xds_port) as envoy,
        healthy_node() as (other, status),
    ):
        await register_node(pd, other, status)  # else the last node would be kept in service
        await wait_for_state(engine, other, "active")
        envoy.sessions[sql] = 1
        began = time.monotonic()
        await pd.delete(f"/topology/tidb/{sql}/ttl")
        await wait_until(lambda: "borne for 1 s" in engine.node(sql).plan.reason)
        assert engine.node(sql).plan.state is State.ACTIVE
        await wait_for_state(engine, sql, "draining")
        assert time.monotonic() - began >= 1.0
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
        await pd.put(f"/topology/tidb/{sql}/ttl", b"1")
        await wait_for_state(engine, sql, "active")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "HEALTHY")


async def test_info_deleted_is_gone_and_forgotten_after_the_last_session(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), healthy_node() as (other, status):
        await register_node(pd, other, status)
        await wait_for_state(engine, other, "active")
        async with FakeEnvoy(engine.xds_port) as envoy:
            envoy.sessions[sql] = 2
            await wait_until(lambda: engine.node(sql).sessions == 2)
            await pd.delete(f"/topology/tidb/{sql}/", prefix=True)
            await wait_for_state(engine, sql, "gone")
            await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
            await asyncio.sleep(1.5)  # the sessions are still there
            assert engine.node(sql).plan.state is State.GONE
            envoy.sessions.clear()
            await wait_for_state(engine, sql, None)
            await envoy.wait_for_endpoints(lambda endpoints: sql not in endpoints)
            forgotten = await EventRecorder(engine).wait_for("node.forgotten")
            assert forgotten.subject == sql


async def test_drained_needs_a_fresh_zero_of_every_envoy(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with (
        one_node(tmp_path, etcd, pd) as (engine, sql),
        FakeEnvoy(engine.xds_port, "envoy-2") as silent,
        FakeEnvoy(engine.xds_port, "envoy-1"),
    ):
        silent.sessions[sql] = 1
        await wait_until(lambda: engine.node(sql).sessions == 1)
        await engine.drain(sql)
        await wait_for_state(engine, sql, "draining")
        silent.sessions.clear()
        await wait_for_state(engine, sql, "drained")
        await engine.undrain(sql)
        await wait_for_state(engine, sql, "active")
        silent.is_reporting = False
        await engine.drain(sql)
        await asyncio.sleep(1.5)
        assert engine.node(sql).plan.state is State.DRAINING
        silent.is_reporting = True
        await wait_for_state(engine, sql, "drained")


async def test_an_envoy_that_was_seen_before_a_restart_has_to_report_after_it(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(pd, sql, status)
        async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine:
            await wait_for_state(engine, sql, "active")
            async with (
                FakeEnvoy(engine.xds_port, "envoy-1"),
                FakeEnvoy(engine.xds_port, "envoy-2"),
            ):
                await wait_until(lambda: [view.sessions for view in engine.envoys()] == [0, 0])
                await engine.drain(sql)
        saved = json.loads((tmp_path / "state" / "plan.json").read_text())["content"]["envoys"]
        assert sorted(saved) == ["envoy-1", "envoy-2"]
        async with (
            run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine,
            FakeEnvoy(engine.xds_port, "envoy-1"),
        ):
            await asyncio.sleep(1.5)
            assert engine.node(sql).plan.state is State.DRAINING
            async with FakeEnvoy(engine.xds_port, "envoy-2"):
                await wait_for_state(engine, sql, "drained")


async def test_a_dead_node_is_unhealthy_while_another_serves(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, good), FakeEnvoy(engine.xds_port) as envoy:
        async with healthy_node() as (sql, status):
            await register_node(pd, sql, status)
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
        await wait_for_state(engine, sql, "unhealthy")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[good][0] == "HEALTHY"
        assert "refuse" in engine.node(sql).plan.reason


async def test_a_node_that_never_answers_is_never_published(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), FakeEnvoy(engine.xds_port) as envoy:
        with refusing_port() as dead:
            await register_node(pd, dead, dead)
            await wait_for_state(engine, dead, "joining")
            await wait_until(lambda: engine.node(dead).health.sql is not None)
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
            assert dead not in envoy.endpoints
            await pd.delete(f"/topology/tidb/{dead}/", prefix=True)
            await wait_for_state(engine, dead, None)


async def test_losing_pd_changes_nothing_for_envoys(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), FakeEnvoy(engine.xds_port) as envoy:
        await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
        before = len(envoy.published)
        told = EventRecorder(engine)
        await etcd.kill()
        await told.wait_for("source.outage", 30)
        assert engine.readiness_problems() == []
        assert len(envoy.published) == before
        await etcd.restart()
        await told.wait_for("source.recovered", 30)
        assert engine.node(sql).plan.state is State.ACTIVE
        assert len(envoy.published) == before


async def test_a_node_that_dies_while_pd_is_away_is_unhealthy(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    """PD still has it as registered, and nobody can ask PD: the checks alone tell."""
    async with one_node(tmp_path, etcd, pd) as (engine, good), FakeEnvoy(engine.xds_port) as envoy:
        told = EventRecorder(engine)
        async with healthy_node() as (sql, status):
            await register_node(pd, sql, status)
            await wait_for_state(engine, sql, "active")
            await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
            await etcd.kill()
            await told.wait_for("source.outage", 30)
            assert engine.node(sql).plan.state is State.ACTIVE
        await wait_for_state(engine, sql, "unhealthy")
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[good][0] == "HEALTHY"
        assert "refuse" in engine.node(sql).plan.reason
        assert not etcd.is_running

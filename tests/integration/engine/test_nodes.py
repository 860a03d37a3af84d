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
    NO_PD,
    SimulatedEnvoy,
    Told,
    becomes,
    node,
    register,
    running,
    settings,
)
from tests.support.fake_servers import closed_port
from tests.support.waiting import until


@pytest.fixture
async def pd(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


@contextlib.asynccontextmanager
async def one_node(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient, **sections: object
) -> AsyncIterator[tuple[Engine, str]]:
    """An engine with one active node from PD."""
    async with node() as (sql, status):
        await register(pd, sql, status)
        async with running(settings(tmp_path, pd={"urls": [etcd.url]}, **sections)) as engine:
            await becomes(engine, sql, "active")
            yield engine, sql


async def test_a_node_that_registers_is_published_at_once(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with (
        running(settings(tmp_path, pd={"urls": [etcd.url]})) as engine,
        SimulatedEnvoy(engine.xds_port) as envoy,
    ):
        await envoy.until(lambda endpoints: endpoints == {})
        took = []
        for _ in range(3):
            async with node() as (sql, status):
                began = time.monotonic()
                await register(pd, sql, status)
                await envoy.until(lambda endpoints, sql=sql: sql in endpoints)  # type: ignore[misc]
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
        await until(lambda: {problem.subject for problem in engine.problems()} >= bad.keys())
        event = await Told(engine).find("source.problem")
        assert "is left out" in event.message
        assert [view.plan.node.address for view in engine.nodes()] == [sql]
        assert engine.node(sql).plan.state is State.ACTIVE


async def test_ttl_lost_is_borne_for_the_grace_and_then_drains(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    grace = {"registration_grace": 1.0}
    async with (
        one_node(tmp_path, etcd, pd, drain=grace) as (engine, sql),
        SimulatedEnvoy(engine.xds_port) as envoy,
        node() as (other, status),
    ):
        await register(pd, other, status)  # else the last node would be kept in service
        await becomes(engine, other, "active")
        envoy.sessions[sql] = 1
        began = time.monotonic()
        await pd.delete(f"/topology/tidb/{sql}/ttl")
        await until(lambda: "borne for 1 s" in engine.node(sql).plan.reason)
        assert engine.node(sql).plan.state is State.ACTIVE
        await becomes(engine, sql, "draining")
        assert time.monotonic() - began >= 1.0
        await envoy.until(lambda endpoints: endpoints[sql][0] == "DRAINING")
        await pd.put(f"/topology/tidb/{sql}/ttl", b"1")
        await becomes(engine, sql, "active")
        await envoy.until(lambda endpoints: endpoints[sql][0] == "HEALTHY")


async def test_info_deleted_is_gone_and_forgotten_after_the_last_session(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), node() as (other, status):
        await register(pd, other, status)
        await becomes(engine, other, "active")
        async with SimulatedEnvoy(engine.xds_port) as envoy:
            envoy.sessions[sql] = 2
            await until(lambda: engine.node(sql).sessions == 2)
            await pd.delete(f"/topology/tidb/{sql}/", prefix=True)
            await becomes(engine, sql, "gone")
            await envoy.until(lambda endpoints: endpoints[sql][0] == "DRAINING")
            await asyncio.sleep(1.5)  # the sessions are still there
            assert engine.node(sql).plan.state is State.GONE
            envoy.sessions.clear()
            await becomes(engine, sql, None)
            await envoy.until(lambda endpoints: sql not in endpoints)
            forgotten = await Told(engine).find("node.forgotten")
            assert forgotten.subject == sql


async def test_drained_needs_a_fresh_zero_of_every_envoy(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with (
        one_node(tmp_path, etcd, pd) as (engine, sql),
        SimulatedEnvoy(engine.xds_port, "envoy-2") as silent,
        SimulatedEnvoy(engine.xds_port, "envoy-1"),
    ):
        silent.sessions[sql] = 1
        await until(lambda: engine.node(sql).sessions == 1)
        await engine.drain(sql)
        await becomes(engine, sql, "draining")
        silent.sessions.clear()
        await becomes(engine, sql, "drained")
        await engine.undrain(sql)
        await becomes(engine, sql, "active")
        silent.reporting = False
        await engine.drain(sql)
        await asyncio.sleep(1.5)
        assert engine.node(sql).plan.state is State.DRAINING
        silent.reporting = True
        await becomes(engine, sql, "drained")


async def test_an_envoy_that_was_seen_before_a_restart_has_to_report_after_it(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(pd, sql, status)
        async with running(settings(tmp_path, pd={"urls": [etcd.url]})) as engine:
            await becomes(engine, sql, "active")
            async with (
                SimulatedEnvoy(engine.xds_port, "envoy-1"),
                SimulatedEnvoy(engine.xds_port, "envoy-2"),
            ):
                await until(lambda: [view.sessions for view in engine.envoys()] == [0, 0])
                await engine.drain(sql)
        saved = json.loads((tmp_path / "state" / "plan.json").read_text())["content"]["envoys"]
        assert sorted(saved) == ["envoy-1", "envoy-2"]
        async with (
            running(settings(tmp_path, pd={"urls": [NO_PD]})) as engine,
            SimulatedEnvoy(engine.xds_port, "envoy-1"),
        ):
            await asyncio.sleep(1.5)
            assert engine.node(sql).plan.state is State.DRAINING
            async with SimulatedEnvoy(engine.xds_port, "envoy-2"):
                await becomes(engine, sql, "drained")


async def test_a_dead_node_is_unhealthy_while_another_serves(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, good), SimulatedEnvoy(engine.xds_port) as envoy:
        async with node() as (sql, status):
            await register(pd, sql, status)
            await envoy.until(lambda endpoints: sql in endpoints)
        await becomes(engine, sql, "unhealthy")
        await envoy.until(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[good][0] == "HEALTHY"
        assert "refuse" in engine.node(sql).plan.reason


async def test_a_node_that_never_answers_is_never_published(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), SimulatedEnvoy(engine.xds_port) as envoy:
        with closed_port() as dead:
            await register(pd, dead, dead)
            await becomes(engine, dead, "joining")
            await until(lambda: engine.node(dead).health.sql is not None)
            await envoy.until(lambda endpoints: sql in endpoints)
            assert dead not in envoy.endpoints
            await pd.delete(f"/topology/tidb/{dead}/", prefix=True)
            await becomes(engine, dead, None)


async def test_losing_pd_changes_nothing_for_envoys(tmp_path: Path, etcd: Etcd, pd: EtcdClient) -> None:
    async with one_node(tmp_path, etcd, pd) as (engine, sql), SimulatedEnvoy(engine.xds_port) as envoy:
        await envoy.until(lambda endpoints: sql in endpoints)
        before = len(envoy.published)
        told = Told(engine)
        await etcd.kill()
        await told.find("source.outage", 30)
        assert engine.unready() == []
        assert len(envoy.published) == before
        await etcd.restart()
        await told.find("source.recovered", 30)
        assert engine.node(sql).plan.state is State.ACTIVE
        assert len(envoy.published) == before


async def test_a_node_that_dies_while_pd_is_away_is_unhealthy(
    tmp_path: Path, etcd: Etcd, pd: EtcdClient
) -> None:
    """PD still has it as registered, and nobody can ask PD: the checks alone tell."""
    async with one_node(tmp_path, etcd, pd) as (engine, good), SimulatedEnvoy(engine.xds_port) as envoy:
        told = Told(engine)
        async with node() as (sql, status):
            await register(pd, sql, status)
            await becomes(engine, sql, "active")
            await envoy.until(lambda endpoints: sql in endpoints)
            await etcd.kill()
            await told.find("source.outage", 30)
            assert engine.node(sql).plan.state is State.ACTIVE
        await becomes(engine, sql, "unhealthy")
        await envoy.until(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
        assert envoy.endpoints[good][0] == "HEALTHY"
        assert "refuse" in engine.node(sql).plan.reason
        assert not etcd.running

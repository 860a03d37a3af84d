"""What Envoys get while a control plane starts: with and without a saved plan, with and without PD."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from controlplane.etcd.client import EtcdClient
from controlplane.model.nodes import State
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    FAST_CHECKS,
    UNREACHABLE_PD_URL,
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    register_node,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts
from tests.support.waiting import assert_never, wait_until


def healthy(*endpoints: str) -> set[tuple[str, str]]:
    return {(endpoint, "HEALTHY") for endpoint in endpoints}


def states(published: dict[str, tuple[str, int]]) -> set[tuple[str, str]]:
    return {(endpoint, health) for endpoint, (health, _) in published.items()}


async def test_nothing_is_published_without_pd_and_saved_plan(tmp_path: Path) -> None:
    async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
        recorder = EventRecorder(engine)
        async with FakeEnvoy(engine.xds_port) as envoy:
            await recorder.wait_for("envoy.connected")
            outage = await recorder.wait_for("source.outage")
            # 1.2 s is longer than a tick of the engine.
            await assert_never(lambda: bool(envoy.published), 1.2)
        outage_problem, unpublished = engine.readiness_problems()
        assert outage_problem == outage.message
        assert "no plan has been published" in unpublished
    assert not (tmp_path / "state" / "plan.json").exists()


async def test_unpublished_plan_is_not_published_after_a_restart(tmp_path: Path) -> None:
    """An empty plan could replace a good configuration of an Envoy that this control plane does not know."""
    for _ in range(2):
        async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
            async with FakeEnvoy(engine.xds_port) as envoy:
                await EventRecorder(engine).wait_for("source.outage")
                assert envoy.published == []
            assert "no plan has been published yet" in engine.readiness_problems()


async def test_saved_plan_is_published_at_once_without_pd(tmp_path: Path) -> None:
    async with healthy_node() as (sql, status):
        async with Etcd.start(tmp_path / "etcd") as etcd, EtcdClient([etcd.url]) as client:
            await register_node(client, sql, status)
            async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine:
                await wait_for_state(engine, sql, "active")
        async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
            assert engine.cluster.node(sql).plan.state is State.ACTIVE
            async with FakeEnvoy(engine.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: bool(endpoints))
                assert states(envoy.published[0]) == healthy(sql)
                await EventRecorder(engine).wait_for("source.outage")
                await wait_for_plans(engine, 2)
                assert states(envoy.published[-1]) == healthy(sql)
            assert engine.readiness_problems() == []


async def test_first_plan_waits_for_both_first_checks(tmp_path: Path) -> None:
    """The status port answers at once, the SQL port later. The first published plan has both results."""
    greeting = asyncio.Event()

    async def delayed_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeting.wait()
        writer.write(mysql_packet(GREETING_PAYLOAD))

    async with healthy_node() as (_, status), run_fake_server(delayed_greeting) as sql:
        node_settings = [{"address": sql.endpoint, "status_address": status}]
        async with (
            run_engine(settings(tmp_path, nodes=node_settings)) as engine,
            FakeEnvoy(engine.xds_port) as envoy,
        ):
            await wait_until(lambda: engine.cluster.node(sql.endpoint).health.status is not None)
            await assert_never(lambda: bool(envoy.published), 0.1)
            assert engine.readiness_problems() == ["no plan has been published yet"]
            greeting.set()
            await envoy.wait_for_endpoints(lambda endpoints: bool(endpoints))
            assert states(envoy.published[0]) == healthy(sql.endpoint)


async def test_unresponsive_node_delays_the_first_plan_only_briefly(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    health_settings = {"status": FAST_CHECKS, "sql": {"interval": 0.1, "timeout": 30}}
    async with healthy_node() as (healthy_sql, _), run_fake_server(silent) as silent_server:
        node_settings = [{"address": healthy_sql}, {"address": silent_server.endpoint}]
        async with run_engine(settings(tmp_path, nodes=node_settings, health=health_settings)) as engine:
            async with FakeEnvoy(engine.xds_port) as envoy:
                start = time.monotonic()
                await envoy.wait_for_endpoints(lambda endpoints: bool(endpoints))
                assert 2.0 < time.monotonic() - start < 8.0
                assert states(envoy.published[0]) == healthy(healthy_sql)
            assert engine.readiness_problems() == []


async def test_nodes_of_a_late_pd_are_checked_before_the_first_publish(
    tmp_path: Path,
) -> None:
    """A PD outage must not use up the time limit of the first checks."""
    async with healthy_node() as (sql, status), Etcd.start(tmp_path / "etcd") as etcd:
        async with EtcdClient([etcd.url]) as client:
            await register_node(client, sql, status)
        await etcd.kill()
        async with (
            run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine,
            FakeEnvoy(engine.xds_port) as envoy,
        ):
            # 3.5 s is longer than the time limit of the first checks.
            await assert_never(lambda: bool(envoy.published), 3.5)
            await etcd.restart()
            await envoy.wait_for_endpoints(lambda endpoints: True, 20)
            assert states(envoy.published[0]) == healthy(sql)


async def test_empty_plan_is_published_but_not_ready(tmp_path: Path) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await envoy.wait_for_endpoints(lambda endpoints: endpoints == {})
        assert engine.readiness_problems() == ["no node is active"]


async def test_host_names_are_resolved_and_published(tmp_path: Path) -> None:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql:
        name = f"localhost:{sql.endpoint.rpartition(':')[2]}"
        async with run_engine(settings(tmp_path, nodes=[{"address": name}])) as engine:
            async with FakeEnvoy(engine.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: sql.endpoint in endpoints)
            assert engine.cluster.node(name).plan.endpoint == sql.endpoint
            await engine.operations.add("no-such-host.invalid:4000")
            await wait_until(
                lambda: "cannot be resolved" in engine.cluster.node("no-such-host.invalid:4000").plan.reason
            )


@pytest.mark.parametrize("file", ["intents.json", "plan.json"])
async def test_damaged_file_is_reported_and_preserved(tmp_path: Path, file: str) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / file).write_text('{"tidevoy": "torn')
    async with run_engine(settings(tmp_path)) as engine:
        event = await EventRecorder(engine).wait_for("state.load_failed")
        assert str(state / file) in event.message
        (damaged_copy,) = state.glob(f"{file}.damaged-*")
        assert str(damaged_copy) in event.message
        assert damaged_copy.read_text() == '{"tidevoy": "torn'
        await engine.operations.add("127.0.0.1:4999")
    assert json.loads((state / "intents.json").read_text())["content"]["added"]

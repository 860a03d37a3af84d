"""Node operations: their effects, persistence over restarts, concurrency, cancellation and disk errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.engine.engine import Engine
from controlplane.errors import ModuleRequired, NodeExists, StateUnavailable, UnknownNode
from controlplane.etcd.client import EtcdClient
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import Source, State
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    UNREACHABLE_PD_URL,
    FakeEnvoy,
    current_facts,
    healthy_node,
    register_node,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
from tests.support.waiting import wait_until

Address = tuple[str, str]


@pytest.fixture
async def sql() -> AsyncIterator[str]:
    async with healthy_node() as (address, _):
        yield address


def on_disk(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "state" / "intents.json").read_text())["content"]
    return content


def saved_plan(tmp_path: Path) -> str:
    """Return the saved plan. Before the engine saves it, it deletes the intents of completed removals."""
    file = tmp_path / "state" / "plan.json"
    return file.read_text() if file.exists() else ""


def in_memory(engine: Engine) -> dict[str, Any]:
    """Return the drained and the added nodes, sorted, as the engine's views show them."""
    return {
        "drains": sorted(view.plan.node.address for view in engine.cluster.nodes() if view.drain is not None),
        "added": sorted(
            view.plan.node.address for view in engine.cluster.nodes() if view.plan.node.source is Source.API
        ),
    }


async def test_added_node_is_published_drained_undrained_and_removed(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        added = await engine.operations.add(sql, weight=50, labels={"zone": "a"})
        assert (added.plan.state, added.weight, dict(added.plan.node.labels)) == (
            State.JOINING,
            50,
            {"zone": "a"},
        )
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        with pytest.raises(NodeExists):
            await engine.operations.add(sql)
        envoy.sessions[sql] = 1
        await wait_until(lambda: engine.cluster.node(sql).sessions == 1)
        drained = await engine.operations.drain(sql, deadline_seconds=5)
        assert drained.plan.state is State.DRAINING
        assert drained.drain is not None
        assert (await engine.operations.drain(sql, deadline_seconds=5)).drain == drained.drain  # repeated
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
        undrained = await engine.operations.undrain(sql)
        assert undrained.plan.state is State.ACTIVE
        assert (await engine.operations.undrain(sql)).drain is None
        updated = await engine.operations.update(sql, weight=7, labels={"zone": "b"})
        assert (updated.weight, dict(updated.plan.node.labels)) == (7, {"zone": "b"})
        assert (await engine.operations.remove(sql)).plan.state is State.DRAINING
        envoy.sessions.clear()
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: not on_disk(tmp_path)["removed"], 5)
        assert not any(on_disk(tmp_path).values())
        with pytest.raises(UnknownNode):
            await engine.operations.remove(sql)


async def test_rejected_operations_change_nothing(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config) as engine, FakeEnvoy(engine.xds_port):
        await wait_for_state(engine, sql, "active")
        await wait_until(lambda: len(engine.cluster.envoys()) == 1)
        with pytest.raises(ModuleRequired):
            await engine.operations.drain(sql, on_deadline=OnDeadline.CLOSE)
        with pytest.raises(ModuleRequired):
            await engine.operations.remove(sql, force=True)
        operations = engine.operations
        for call in (operations.drain, operations.undrain, operations.remove, operations.update):
            with pytest.raises(UnknownNode):
                await call("10.9.9.9:4000")
        assert engine.cluster.node(sql).plan.state is State.ACTIVE
        assert not (tmp_path / "state" / "intents.json").exists()


async def test_removed_configured_node_stays_excluded_until_added(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql, "weight": 30}])
    async with run_engine(config) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.operations.drain(sql)
        await engine.operations.update(sql, weight=3)
        await engine.operations.remove(sql)
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: not on_disk(tmp_path)["drains"], 5)
        assert list(on_disk(tmp_path)["removed"]) == [sql]
        assert engine.cluster.excluded_addresses() == [sql]
    async with run_engine(config) as engine:
        assert engine.cluster.nodes() == []
        readded = await engine.operations.add(sql)
        assert readded.plan.node.source is Source.STATIC
        assert engine.cluster.excluded_addresses() == []
        assert readded.weight == 30
        await wait_for_state(engine, sql, "active")
        assert not any(on_disk(tmp_path).values())


async def test_removed_pd_node_stays_excluded_when_it_registers_again(tmp_path: Path, etcd: Etcd) -> None:
    """A restarting TiDB server deletes and rewrites its entry in PD. This must not cancel the removal."""
    async with (
        EtcdClient([etcd.url]) as pd,
        healthy_node() as (sql, status),
        healthy_node() as second,
        healthy_node() as third,
    ):
        await register_node(pd, sql, status)
        async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine:
            await wait_for_state(engine, sql, "active")
            await engine.operations.remove(sql)
            await wait_for_state(engine, sql, None)
            await pd.delete(f"/topology/tidb/{sql}/", prefix=True)
            await register_node(pd, *second)  # PD sends changes in order: the deletion comes first
            await wait_until(lambda: second[0] in saved_plan(tmp_path))
            await register_node(pd, sql, status)
            await register_node(pd, *third)
            await wait_for_state(engine, third[0], "active")
            assert {view.plan.node.address for view in engine.cluster.nodes()} == {second[0], third[0]}
            readded = await engine.operations.add(sql)
            assert readded.plan.node.source is Source.PD
            await wait_for_state(engine, sql, "active")


async def test_unfinished_removal_continues_after_a_restart(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await engine.operations.add(sql)
        envoy.sessions[sql] = 1
        await wait_for_state(engine, sql, "active")
        await wait_until(lambda: engine.cluster.node(sql).sessions == 1)
        await engine.operations.remove(sql)
    async with run_engine(settings(tmp_path)) as engine:
        assert engine.cluster.node(sql).plan.state is State.DRAINING
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_for_state(engine, sql, None)
            await wait_until(lambda: not on_disk(tmp_path)["removed"], 5)
            await envoy.wait_for_endpoints(lambda endpoints: sql not in endpoints)


async def test_drains_and_weights_survive_a_restart(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.operations.update(sql, weight=9)
        before = await engine.operations.drain(sql)
    async with run_engine(config) as engine:
        after = engine.cluster.node(sql)
        assert (after.weight, after.drain) == (9, before.drain)
        assert after.plan.state in (State.DRAINING, State.DRAINED)
        assert after.plan.closed_since == before.plan.closed_since


async def test_removed_node_can_be_added_while_pd_is_unavailable(tmp_path: Path, sql: str) -> None:
    # The first engine saves a plan, without which the next engine would wait for PD.
    async with run_engine(settings(tmp_path)) as engine:
        await engine.operations.add(sql)
        await wait_for_state(engine, sql, "active")
    async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
        await wait_until(lambda: sql in saved_plan(tmp_path))
        await engine.operations.remove(sql)
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: sql not in saved_plan(tmp_path))
        assert list(on_disk(tmp_path)["removed"]) == [sql]
        added = await engine.operations.add(sql, weight=5)
        assert (added.plan.node.source, added.weight) == (Source.API, 5)
        await wait_for_state(engine, sql, "active")


async def test_undrain_of_an_unconfigured_node_deletes_it(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config, load_settings=lambda: settings(tmp_path)) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.operations.drain(sql)
        await wait_for_state(engine, sql, "drained")
        await engine.reload()  # the configuration no longer has the node
        await wait_for_state(engine, sql, "gone")
        assert "will be drained when it comes back" in engine.cluster.node(sql).plan.reason
        undrained = await engine.operations.undrain(sql)
        assert undrained.plan.node.address == sql
        await wait_for_state(engine, sql, None)


async def test_concurrent_operations_are_all_applied(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        await asyncio.gather(
            engine.operations.drain(sql),
            engine.operations.update(sql, weight=3),
            engine.operations.add("127.0.0.1:4998"),
            engine.operations.add("127.0.0.1:4999"),
        )
        assert engine.cluster.node(sql).weight == 3
        assert in_memory(engine) == {"drains": [sql], "added": ["127.0.0.1:4998", "127.0.0.1:4999"]}
        stored = on_disk(tmp_path)
        assert (list(stored["drains"]), sorted(stored["added"]), stored["weights"]) == (
            [sql],
            ["127.0.0.1:4998", "127.0.0.1:4999"],
            {sql: 3},
        )
        both = await asyncio.gather(
            engine.operations.add("127.0.0.1:5000"),
            engine.operations.add("127.0.0.1:5000"),
            return_exceptions=True,
        )
        assert [type(result) for result in both].count(NodeExists) == 1


async def test_cancelled_operation_is_atomic(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        outcomes = set()
        for steps in range(60):  # cancel the call before, during or after the write
            call = asyncio.create_task(engine.operations.drain(sql))
            for _ in range(steps):
                await asyncio.sleep(0 if steps < 30 else 0.0003)
            call.cancel()
            await asyncio.wait({call})
            drains = on_disk(tmp_path)["drains"] if (tmp_path / "state" / "intents.json").exists() else {}
            assert sorted(drains) == in_memory(engine)["drains"], f"cancelled after {steps} steps"
            outcomes.add((call.cancelled(), bool(drains)))
            await engine.operations.undrain(sql)
        assert (True, True) in outcomes, outcomes  # some calls were cancelled during the write


async def test_failed_write_changes_nothing_and_the_next_call_works(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        obstacle = tmp_path / "state" / ".intents.json.new"
        obstacle.mkdir()
        for call in (
            engine.operations.drain(sql),
            engine.operations.remove(sql),
            engine.operations.update(sql, weight=2),
            engine.operations.add("127.0.0.1:4999"),
        ):
            with pytest.raises(StateUnavailable):
                await call
        view = engine.cluster.node(sql)
        assert (view.plan.state, view.weight, view.drain) == (State.ACTIVE, 100, None)
        assert len(engine.cluster.nodes()) == 1
        obstacle.rmdir()
        await engine.operations.drain(sql)
        assert list(on_disk(tmp_path)["drains"]) == [sql]


async def test_failed_plan_save_is_counted_and_retried(tmp_path: Path, sql: str) -> None:
    def failed_saves() -> float:
        return engine.registry.get_sample_value("tidevoy_plan_saves_failed_total") or 0.0

    async with run_engine(settings(tmp_path)) as engine:
        obstacle = tmp_path / "state" / ".plan.json.new"
        obstacle.mkdir()
        await engine.operations.add(sql)
        await wait_until(lambda: failed_saves() > 0)
        obstacle.rmdir()
        await wait_until(lambda: (tmp_path / "state" / "plan.json").exists(), 5)
        assert engine.cluster.node(sql).plan.node.address == sql


async def test_drain_waits_for_an_envoy_seen_before_a_restart(tmp_path: Path, sql: str) -> None:
    """However long ago the Envoy was seen, it may have run while the control plane was down."""
    config = settings(tmp_path)
    async with (
        run_engine(config) as engine,
        FakeEnvoy(engine.xds_port, "envoy-1") as envoy,
        FakeEnvoy(engine.xds_port, "envoy-2"),
    ):
        await engine.operations.add(sql)
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        envoy.sessions[sql] = 1
        await wait_until(lambda: sorted(view.sessions or 0 for view in engine.cluster.envoys()) == [0, 1])
        await engine.operations.drain(sql)
    saved = json.loads((tmp_path / "state" / "plan.json").read_text())["content"]["envoys"]
    assert sorted(saved) == ["envoy-1", "envoy-2"]
    later_time = time.time() + 3600
    async with run_engine(config, clock=lambda: later_time + time.monotonic()) as engine:
        await wait_for_plans(engine, 2)
        assert engine.cluster.node(sql).plan.state is State.DRAINING
        async with FakeEnvoy(engine.xds_port, "envoy-2"):
            await wait_until(lambda: "envoy-2" in current_facts(engine).loads)
            await wait_for_plans(engine)
            assert engine.cluster.node(sql).plan.state is State.DRAINING
            async with FakeEnvoy(engine.xds_port, "envoy-1"):
                await wait_for_state(engine, sql, "drained")


async def test_envoy_that_rejects_the_plan_keeps_the_node_draining(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await engine.operations.add(sql)
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        envoy.nack_message = "not this one"
        await engine.operations.drain(sql)
        await wait_until(lambda: engine.cluster.envoys()[0].status.last_nack is not None)
        await wait_for_plans(engine, 2)
        assert engine.cluster.node(sql).plan.state is State.DRAINING
        envoy.nack_message = ""
        await engine.operations.update(sql, labels={"a": "b"})
        await engine.operations.undrain(sql)
        await engine.operations.drain(sql)
        await wait_for_state(engine, sql, "drained")

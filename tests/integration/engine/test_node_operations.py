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
from controlplane.errors import NeedsModule, NodeExists, StateUnavailable, UnknownNode
from controlplane.etcd.client import EtcdClient
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import Source, State
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    UNREACHABLE_PD_URL,
    FakeEnvoy,
    healthy_node,
    register_node,
    run_engine,
    settings,
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
    """Return the plan on disk. Completed removals are deleted before it is saved."""
    file = tmp_path / "state" / "plan.json"
    return file.read_text() if file.exists() else ""


def in_memory(engine: Engine) -> dict[str, Any]:
    """Return the engine's intents in the same shape, as far as its views show them."""
    return {
        "drains": sorted(view.plan.node.address for view in engine.nodes() if view.drain is not None),
        "added": sorted(
            view.plan.node.address for view in engine.nodes() if view.plan.node.source is Source.API
        ),
    }


async def test_added_node_is_published_drained_undrained_and_removed(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        added = await engine.add(sql, weight=50, labels={"zone": "a"})
        assert (added.plan.state, added.weight, dict(added.plan.node.labels)) == (
            State.JOINING,
            50,
            {"zone": "a"},
        )
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        with pytest.raises(NodeExists):
            await engine.add(sql)
        envoy.sessions[sql] = 1
        await wait_until(lambda: engine.node(sql).sessions == 1)
        drained = await engine.drain(sql, deadline_seconds=5)
        assert drained.plan.state is State.DRAINING
        assert drained.drain is not None
        assert (await engine.drain(sql, deadline_seconds=5)).drain == drained.drain  # repeated
        await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
        undrained = await engine.undrain(sql)
        assert undrained.plan.state is State.ACTIVE
        assert (await engine.undrain(sql)).drain is None
        updated = await engine.update(sql, weight=7, labels={"zone": "b"})
        assert (updated.weight, dict(updated.plan.node.labels)) == (7, {"zone": "b"})
        assert (await engine.remove(sql)).plan.state is State.DRAINING
        envoy.sessions.clear()
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: not on_disk(tmp_path)["removed"], 5)
        assert not any(on_disk(tmp_path).values())
        with pytest.raises(UnknownNode):
            await engine.remove(sql)


async def test_rejected_operations_change_nothing(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config) as engine, FakeEnvoy(engine.xds_port):
        await wait_for_state(engine, sql, "active")
        await wait_until(lambda: len(engine.envoys()) == 1)
        with pytest.raises(NeedsModule):
            await engine.drain(sql, on_deadline=OnDeadline.CLOSE)
        with pytest.raises(NeedsModule):
            await engine.remove(sql, force=True)
        for call in (engine.drain, engine.undrain, engine.remove, engine.update):
            with pytest.raises(UnknownNode):
                await call("10.9.9.9:4000")
        assert engine.node(sql).plan.state is State.ACTIVE
        assert not (tmp_path / "state" / "intents.json").exists()


async def test_removed_configured_node_stays_excluded_until_added(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql, "weight": 30}])
    async with run_engine(config) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.drain(sql)
        await engine.update(sql, weight=3)
        await engine.remove(sql)
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: not on_disk(tmp_path)["drains"], 5)
        assert list(on_disk(tmp_path)["removed"]) == [sql]
        assert engine.excluded_addresses() == [sql]
    async with run_engine(config) as engine:
        assert engine.nodes() == []
        readded = await engine.add(sql)
        assert readded.plan.node.source is Source.STATIC
        assert engine.excluded_addresses() == []
        assert readded.weight == 30
        await wait_for_state(engine, sql, "active")
        assert not any(on_disk(tmp_path).values())


async def test_removed_pd_node_stays_excluded_when_it_registers_again(tmp_path: Path, etcd: Etcd) -> None:
    """A restarting TiDB server deletes and rewrites its entry, which must not cancel the removal."""
    async with (
        EtcdClient([etcd.url]) as pd,
        healthy_node() as (sql, status),
        healthy_node() as second,
        healthy_node() as third,
    ):
        await register_node(pd, sql, status)
        async with run_engine(settings(tmp_path, pd={"urls": [etcd.url]})) as engine:
            await wait_for_state(engine, sql, "active")
            await engine.remove(sql)
            await wait_for_state(engine, sql, None)
            await pd.delete(f"/topology/tidb/{sql}/", prefix=True)
            await register_node(pd, *second)  # PD delivers changes in order
            await wait_until(lambda: second[0] in saved_plan(tmp_path))
            await register_node(pd, sql, status)
            await register_node(pd, *third)
            await wait_for_state(engine, third[0], "active")
            assert {view.plan.node.address for view in engine.nodes()} == {second[0], third[0]}
            readded = await engine.add(sql)
            assert readded.plan.node.source is Source.PD
            await wait_for_state(engine, sql, "active")


async def test_unfinished_removal_continues_after_a_restart(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await engine.add(sql)
        envoy.sessions[sql] = 1
        await wait_for_state(engine, sql, "active")
        await wait_until(lambda: engine.node(sql).sessions == 1)
        await engine.remove(sql)
    async with run_engine(settings(tmp_path)) as engine:
        assert engine.node(sql).plan.state is State.DRAINING
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_for_state(engine, sql, None)
            await wait_until(lambda: not on_disk(tmp_path)["removed"], 5)
            await envoy.wait_for_endpoints(lambda endpoints: sql not in endpoints)


async def test_drains_and_weights_survive_a_restart(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.update(sql, weight=9)
        before = await engine.drain(sql)
    async with run_engine(config) as engine:
        after = engine.node(sql)
        assert (after.plan.state, after.weight, after.drain) == (
            engine.node(sql).plan.state,
            9,
            before.drain,
        )
        assert after.plan.state in (State.DRAINING, State.DRAINED)
        assert after.plan.closed_since == before.plan.closed_since


async def test_removed_node_can_be_added_while_pd_is_unavailable(tmp_path: Path, sql: str) -> None:
    async with run_engine(
        settings(tmp_path)
    ) as engine:  # without a saved plan the next engine would wait for PD
        await engine.add(sql)
        await wait_for_state(engine, sql, "active")
    async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
        await wait_until(lambda: sql in saved_plan(tmp_path))
        await engine.remove(sql)
        await wait_for_state(engine, sql, None)
        await wait_until(lambda: sql not in saved_plan(tmp_path))
        assert list(on_disk(tmp_path)["removed"]) == [sql]
        added = await engine.add(sql, weight=5)
        assert (added.plan.node.source, added.weight) == (Source.API, 5)
        await wait_for_state(engine, sql, "active")


async def test_undrain_of_an_unconfigured_node_deletes_it(tmp_path: Path, sql: str) -> None:
    config = settings(tmp_path, nodes=[{"address": sql}])
    async with run_engine(config, load_settings=lambda: settings(tmp_path)) as engine:
        await wait_for_state(engine, sql, "active")
        await engine.drain(sql)
        await wait_for_state(engine, sql, "drained")
        await engine.reload()  # the configuration no longer has the node
        await wait_for_state(engine, sql, "gone")
        assert "will be drained when it comes back" in engine.node(sql).plan.reason
        undrained = await engine.undrain(sql)
        assert undrained.plan.node.address == sql
        await wait_for_state(engine, sql, None)


async def test_concurrent_operations_are_all_applied(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        await asyncio.gather(
            engine.drain(sql),
            engine.update(sql, weight=3),
            engine.add("127.0.0.1:4998"),
            engine.add("127.0.0.1:4999"),
        )
        assert engine.node(sql).weight == 3
        assert in_memory(engine) == {"drains": [sql], "added": ["127.0.0.1:4998", "127.0.0.1:4999"]}
        stored = on_disk(tmp_path)
        assert (list(stored["drains"]), sorted(stored["added"]), stored["weights"]) == (
            [sql],
            ["127.0.0.1:4998", "127.0.0.1:4999"],
            {sql: 3},
        )
        both = await asyncio.gather(
            engine.add("127.0.0.1:5000"), engine.add("127.0.0.1:5000"), return_exceptions=True
        )
        assert [type(result) for result in both].count(NodeExists) == 1


async def test_cancelled_operation_is_atomic(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        outcomes = set()
        for steps in range(60):  # cancelled later each time: before, during and after the write
            call = asyncio.create_task(engine.drain(sql))
            for _ in range(steps):
                await asyncio.sleep(0 if steps < 30 else 0.0003)
            call.cancel()
            await asyncio.wait({call})
            drains = on_disk(tmp_path)["drains"] if (tmp_path / "state" / "intents.json").exists() else {}
            assert sorted(drains) == in_memory(engine)["drains"], f"cancelled after {steps} steps"
            outcomes.add((call.cancelled(), bool(drains)))
            await engine.undrain(sql)
        assert (True, True) in outcomes, outcomes  # some calls were cancelled during the write


async def test_failed_write_changes_nothing_and_the_next_call_works(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine:
        await wait_for_state(engine, sql, "active")
        obstacle = tmp_path / "state" / ".intents.json.new"
        obstacle.mkdir()
        for call in (
            engine.drain(sql),
            engine.remove(sql),
            engine.update(sql, weight=2),
            engine.add("127.0.0.1:4999"),
        ):
            with pytest.raises(StateUnavailable):
                await call
        view = engine.node(sql)
        assert (view.plan.state, view.weight, view.drain) == (State.ACTIVE, 100, None)
        assert len(engine.nodes()) == 1
        obstacle.rmdir()
        await engine.drain(sql)
        assert list(on_disk(tmp_path)["drains"]) == [sql]


async def test_failed_plan_save_is_counted_and_retried(tmp_path: Path, sql: str) -> None:
    def failed_saves() -> float:
        return engine.registry.get_sample_value("tidevoy_plan_saves_failed_total") or 0.0

    async with run_engine(settings(tmp_path)) as engine:
        obstacle = tmp_path / "state" / ".plan.json.new"
        obstacle.mkdir()
        await engine.add(sql)
        await wait_until(lambda: failed_saves() > 0)
        obstacle.rmdir()
        await wait_until(lambda: (tmp_path / "state" / "plan.json").exists(), 5)
        assert engine.node(sql).plan.node.address == sql


async def test_drain_waits_for_an_envoy_seen_before_a_restart(tmp_path: Path, sql: str) -> None:
    """However long ago it was seen: the Envoy may have run while this control plane was down."""
    config = settings(tmp_path)
    async with run_engine(config) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await engine.add(sql)
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        envoy.sessions[sql] = 1
        await wait_until(lambda: engine.node(sql).sessions == 1)
        await engine.drain(sql)
    later_time = time.time() + 3600
    async with run_engine(config, clock=lambda: later_time + time.monotonic()) as engine:
        await asyncio.sleep(1.2)  # the engine decides at least every second
        assert engine.node(sql).plan.state is State.DRAINING
        async with FakeEnvoy(engine.xds_port):
            await wait_for_state(engine, sql, "drained")


async def test_envoy_that_rejects_the_plan_keeps_the_node_draining(tmp_path: Path, sql: str) -> None:
    async with run_engine(settings(tmp_path)) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await engine.add(sql)
        await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "HEALTHY")
        envoy.nack_message = "not this one"
        await engine.drain(sql)
        await wait_until(lambda: engine.envoys()[0].status.last_nack is not None)
        await asyncio.sleep(1.2)  # the engine decides at least every second
        assert engine.node(sql).plan.state is State.DRAINING
        envoy.nack_message = ""
        await engine.update(sql, labels={"a": "b"})
        await engine.undrain(sql)
        await engine.drain(sql)
        await wait_for_state(engine, sql, "drained")

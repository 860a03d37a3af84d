"""Several engines on one etcd: one decides, all publish the same plan and apply the same intents."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.engine.engine import Engine
from controlplane.errors import CaptureRunning, ModuleRequired, StateUnavailable
from controlplane.etcd.client import EtcdClient
from controlplane.model.intents import OnDeadline
from controlplane.model.rules import StatementRule
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.version import VERSION
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    register_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.controlplane.etcd_compaction import compact
from tests.support.controlplane.replicas import is_leader, replica_settings, run_engines
from tests.support.suspension import suspended
from tests.support.waiting import assert_never, wait_until


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


def published_versions(engine: Engine) -> list[str]:
    """Return the versions that an engine publishes to its own Envoys."""
    return sorted({status.published_version for status in engine._xds.statuses()})


def published_gauge(engine: Engine) -> float | None:
    return engine.registry.get_sample_value("tidevoy_plan_published")


async def wait_for_rules(envoy: FakeEnvoy, rules: Sequence[Mapping[str, Any]]) -> None:
    await wait_until(lambda: envoy.live_configs[-1].get("rules", []) == rules)


async def test_all_replicas_publish_the_leaders_plan(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with healthy_node() as (sql, status), healthy_node() as (second, second_status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            async with (
                FakeEnvoy(leader.xds_port, "envoy-1") as one,
                FakeEnvoy(follower.xds_port, "envoy-2") as two,
            ):
                await register_node(client, second, second_status)
                for engine, envoy in ((leader, one), (follower, two)):
                    await wait_for_state(engine, second, "active")
                    await envoy.wait_for_endpoints(lambda endpoints: len(endpoints) == 2)
                await wait_until(lambda: published_versions(leader) == published_versions(follower))
                assert leader._planner.plan == follower._planner.plan
            decisions = "tidevoy_plan_duration_seconds_count"
            assert follower.registry.get_sample_value(decisions) == 0.0
            assert leader.registry.get_sample_value("tidevoy_leader") == 1.0
            assert follower.registry.get_sample_value("tidevoy_leader") == 0.0
            event = await EventRecorder(follower).wait_for("node.state")
            assert event.subject in (sql, second)


async def test_drain_waits_while_a_replica_is_unreachable(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    """Envoys of the unreachable replica may have unreported sessions on the node."""
    async with (
        healthy_node() as (sql, status),
        run_engine(replica_settings(tmp_path, "a", etcd)) as leader,
        FakeEnvoy(leader.xds_port, "e1"),
    ):
        await register_node(client, sql, status)
        await wait_until(lambda: is_leader(leader))
        await wait_for_state(leader, sql, "active")
        unreachable_replica = {"enabled": True, "name": "b", "advertise": "127.0.0.1:1"}
        async with run_engine(
            settings(tmp_path / "b", pd={"urls": [etcd.url]}, replicas=unreachable_replica)
        ) as other:
            await wait_for_state(other, sql, "active")
            await wait_until(lambda: len(leader.replicas()) == 2)
            async with FakeEnvoy(other.xds_port, "e2") as busy:
                busy.sessions[sql] = 3
                await wait_until(lambda: other.cluster.node(sql).sessions == 3)
                await leader.operations.drain(sql)
                await assert_never(lambda: leader.cluster.node(sql).plan.state.value == "drained", 4.0)
                assert leader.registry.get_sample_value("tidevoy_replicas_unreachable") == 1
        await wait_for_state(leader, sql, "drained")
        assert leader.registry.get_sample_value("tidevoy_replicas_unreachable") == 0


async def test_intents_are_applied_when_any_replica_responds(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd, "abc") as (leader, *followers):
            for engine in followers:
                await wait_for_state(engine, sql, "active")
                view = await engine.operations.drain(sql)
                assert view.plan.state.value in ("draining", "drained")
                view = await leader.operations.undrain(sql)
                assert view.plan.state.value == "active"
                await wait_until(lambda engine=engine: not engine._intents.current.drains)  # type: ignore[misc]
                view = await engine.operations.update(sql, weight=7)
                assert view.weight == 7
                await leader.operations.update(sql, weight=100)
                await wait_for_state(engine, sql, "active")


async def test_rules_and_captures_reach_the_envoys_of_all_replicas_within_a_second(
    tmp_path: Path, etcd: Etcd
) -> None:
    rule = StatementRule("no-reports", '{"name": "no-reports", "user": ["report"], "block": {}}')
    async with (
        run_engines(tmp_path, etcd, capture={"directory": "/captures"}) as (leader, follower),
        FakeEnvoy(leader.xds_port, "envoy-1", module=VERSION) as one,
        FakeEnvoy(follower.xds_port, "envoy-2", module=VERSION) as two,
    ):
        for rules in ([rule], []):
            await wait_until(lambda: bool(one.live_configs and two.live_configs))
            start = time.monotonic()
            await follower.rules.replace(rules)
            for envoy in (one, two):
                await wait_for_rules(envoy, [rule.definition for rule in rules])
            assert time.monotonic() - start < 1.0
        start = time.monotonic()
        await follower.captures.start("c1", duration=60)
        await wait_until(lambda: {"capture"} <= one.live_configs[-1].keys() & two.live_configs[-1].keys())
        assert time.monotonic() - start < 1.0
        published = [envoy.live_configs[-1]["capture"] for envoy in (one, two)]
        assert [(capture["name"], capture.pop("envoy")) for capture in published] == [
            ("c1", "envoy-1"),
            ("c1", "envoy-2"),
        ]
        assert published[0] == published[1]
        with pytest.raises(CaptureRunning):
            await leader.captures.start("c2", duration=60)
        start = time.monotonic()
        await leader.captures.stop()
        await wait_until(lambda: "capture" not in one.live_configs[-1].keys() | two.live_configs[-1].keys())
        assert time.monotonic() - start < 1.0


async def test_concurrent_intents_on_all_replicas_are_kept(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with run_engines(tmp_path, etcd, "abc") as engines:
        addresses = [f"10.0.0.{number}:4000" for number in range(24)]
        await asyncio.gather(
            *(engines[number % 3].operations.add(address) for number, address in enumerate(addresses)),
        )
        for engine in engines:
            await wait_until(lambda engine=engine: len(engine.cluster.nodes()) == 24)  # type: ignore[misc]


async def test_drain_waits_for_envoys_of_all_replicas(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            async with FakeEnvoy(follower.xds_port, "envoy-2") as envoy:
                envoy.sessions = {sql: 3}
                await envoy.wait_for_endpoints(bool)
                await wait_until(lambda: leader.cluster.node(sql).sessions == 3)
                await leader.operations.drain(sql)
                await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
                await assert_never(lambda: leader.cluster.node(sql).plan.state.value == "drained", 0.5)
                assert leader.cluster.node(sql).sessions == 3
                envoy.sessions = {}
                await wait_for_state(leader, sql, "drained")
                await wait_for_state(follower, sql, "drained")


async def test_all_replicas_require_the_module_on_all_envoys(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            async with FakeEnvoy(leader.xds_port, "envoy-1"):
                await wait_until(lambda: bool(follower.cluster.envoys()))
                with pytest.raises(ModuleRequired, match="envoy-1"):
                    await follower.operations.drain(sql, on_deadline=OnDeadline.CLOSE)


async def test_stopped_leader_is_replaced_at_once(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    loop = asyncio.get_running_loop()
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            a = await first.enter_async_context(run_engine(replica_settings(tmp_path, "a", etcd)))
            await wait_until(lambda: is_leader(a))
            b = await stack.enter_async_context(run_engine(replica_settings(tmp_path, "b", etcd)))
            await wait_for_state(b, sql, "active")
            envoy = await stack.enter_async_context(FakeEnvoy(b.xds_port, "envoy-2"))
            await envoy.wait_for_endpoints(bool)
            await b.operations.drain(sql)
            before = a.valid_term
            published_before = len(envoy.published)
            start = loop.time()
            await first.aclose()
            await wait_until(lambda: is_leader(b))
            assert loop.time() - start < 2.0
            assert (before or 0) < (b.valid_term or 0)
            await wait_until(lambda: [view.name for view in b.replicas()] == ["b"])
            await wait_for_state(b, sql, "drained")
            # The Envoy kept the node, and the node kept draining.
            assert all(endpoints[sql][0] == "DRAINING" for endpoints in envoy.published[published_before:])
            assert (await EventRecorder(b).wait_for("replica.left")).subject == "a"


async def test_joining_replica_publishes_the_shared_plan(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engine(replica_settings(tmp_path, "a", etcd)) as a:
            await wait_for_state(a, sql, "active")
            async with FakeEnvoy(a.xds_port, "envoy-1") as one:
                await one.wait_for_endpoints(bool)
                await wait_until(lambda: a._planner.saved_plan is not None)
                async with (
                    run_engine(replica_settings(tmp_path, "b", etcd)) as b,
                    FakeEnvoy(b.xds_port, "envoy-2") as two,
                ):
                    await two.wait_for_endpoints(lambda endpoints: sql in endpoints)
                    await wait_until(lambda: published_versions(a) == published_versions(b))
                    assert two.published[0] == one.endpoints
                    assert not is_leader(b)
                    await wait_until(lambda: len(a.replicas()) == 2)
                    replicas = {(view.name, view.is_leader, view.is_self) for view in b.replicas()}
                    assert replicas == {("a", True, False), ("b", False, True)}


async def test_empty_plan_is_shared(tmp_path: Path, etcd: Etcd) -> None:
    async with run_engines(tmp_path, etcd) as (_, follower):
        await wait_until(lambda: follower.readiness_problems() == ["no node is active"])
        assert published_gauge(follower) == 1.0


async def test_replica_cancelled_at_any_time_leaves_nothing_behind(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    tasks_before = asyncio.all_tasks()
    was_leader = set()
    for steps in [*range(0, 60, 4), *range(60, 300, 30)]:
        engine = Engine(replica_settings(tmp_path, "a", etcd))
        run = asyncio.create_task(engine.run())
        for _ in range(steps):
            await asyncio.sleep(0 if steps < 60 else 0.0005)
        was_leader.add(is_leader(engine))
        run.cancel()
        await asyncio.wait({run}, timeout=10)
        assert run.cancelled(), steps
        await wait_until(lambda: asyncio.all_tasks() <= tasks_before, 5)
        assert not is_leader(engine)
        entries = (await client.range("/tidevoy/")).entries
        assert entries.keys() <= {"/tidevoy/plan", "/tidevoy/intents"}, steps
    assert was_leader == {True, False}


async def test_revoked_lease_leads_to_a_new_term(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with run_engines(tmp_path, etcd) as (leader, follower):
        term = leader.valid_term or 0
        lease = leader._replicas._lease.id  # type: ignore[union-attr]
        await client.lease_revoke(lease or 0)
        await wait_until(lambda: any((engine.valid_term or 0) > term for engine in (leader, follower)))
        await wait_until(lambda: sum(map(is_leader, (leader, follower))) == 1)
        for engine in (leader, follower):
            await wait_until(lambda engine=engine: len(engine.replicas()) == 2)  # type: ignore[misc]
        await leader.operations.add("10.0.0.1:4000")
        await follower.operations.add("10.0.0.2:4000")
        for engine in (leader, follower):
            await wait_until(lambda engine=engine: len(engine.cluster.nodes()) == 2)  # type: ignore[misc]


async def test_replica_decides_alone_while_the_plan_is_unreadable(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            await client.put("/tidevoy/plan", b"{}")
            assert "cannot be read" in (await EventRecorder(follower).wait_for("replica.standalone")).message
            assert "the plan in PD" in (await EventRecorder(leader).wait_for("state.load_failed")).message
            await follower.operations.drain(sql)  # intents do not need a readable plan
            for engine in (leader, follower):
                await wait_for_state(engine, sql, "drained")
            await client.delete("/tidevoy/plan")
            await wait_until(
                lambda: not follower._planner.publish_gate.is_open or follower._planner.is_follower
            )
            await follower.operations.undrain(sql)
            for engine in (leader, follower):
                await wait_for_state(engine, sql, "active")
            await wait_until(lambda: leader._planner.plan == follower._planner.plan)


async def test_deleted_intents_are_restored(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            await wait_for_state(follower, sql, "active")
            await leader.operations.drain(sql)
            # A replica can restore only intents that it knows, so wait until it knows the drain.
            await wait_until(lambda: follower.cluster.node(sql).drain is not None)
            await client.delete("/tidevoy/intents")
            await follower.operations.update(sql, weight=7)
            for engine in (leader, follower):
                await wait_until(lambda engine=engine: engine.cluster.node(sql).weight == 7)  # type: ignore[misc]
                assert engine.cluster.node(sql).drain is not None


# --- without etcd ---


async def test_etcd_outage_keeps_publishing_and_rejects_writes(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    loop = asyncio.get_running_loop()
    async with healthy_node() as (sql, status), healthy_node() as (second, second_status):
        await register_node(client, sql, status)
        await register_node(client, second, second_status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            for engine in (leader, follower):
                await wait_for_state(engine, sql, "active")
                await wait_for_state(engine, second, "active")
            async with (
                FakeEnvoy(leader.xds_port, "envoy-1") as one,
                FakeEnvoy(follower.xds_port, "envoy-2") as two,
            ):
                await one.wait_for_endpoints(lambda endpoints: len(endpoints) == 2)
                await two.wait_for_endpoints(lambda endpoints: len(endpoints) == 2)
                async with suspended(etcd.process.pid):
                    for engine in (leader, follower):
                        start = loop.time()
                        with pytest.raises(StateUnavailable):
                            await engine.operations.drain(sql)
                        assert loop.time() - start < 5.0
                        assert engine.cluster.node(sql).drain is None
                        assert engine.readiness_problems() == []
                    await wait_until(lambda: not is_leader(leader))  # without a leader, rollouts stop
                    assert leader.cluster.node(sql).plan.state.value == "active"
                    async with FakeEnvoy(follower.xds_port, "envoy-3") as three:
                        await three.wait_for_endpoints(lambda endpoints: len(endpoints) == 2)
                await wait_until(lambda: is_leader(leader) or is_leader(follower))
                leaders = [engine for engine in (leader, follower) if is_leader(engine)]
                assert len(leaders) == 1
                for engine in (leader, follower):
                    assert engine.cluster.node(sql).drain is None
                await (follower if leaders == [leader] else leader).operations.drain(sql)
                for envoy in (one, two):
                    await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "DRAINING")
                await wait_until(lambda: leader._planner.plan == follower._planner.plan)


async def test_leader_without_etcd_decides_for_its_own_envoys(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with contextlib.AsyncExitStack() as node_stack, healthy_node() as (second, second_status):
        sql, status = await node_stack.enter_async_context(healthy_node())
        await register_node(client, sql, status)
        await register_node(client, second, second_status)
        async with run_engines(tmp_path, etcd) as (leader, follower):
            for engine in (leader, follower):
                await wait_for_state(engine, sql, "active")
            async with FakeEnvoy(leader.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: sql in endpoints)
                async with suspended(etcd.process.pid):
                    await wait_until(lambda: not is_leader(leader))
                    await node_stack.aclose()
                    await wait_for_state(leader, sql, "unhealthy")
                    await envoy.wait_for_endpoints(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
                    event = await EventRecorder(leader).wait_for("replica.standalone")
                    assert event.subject in [view.name for view in leader.replicas() if view.is_self]
                await wait_until(lambda: is_leader(leader) or is_leader(follower))
                await wait_for_state(follower, sql, "unhealthy")
                await wait_until(lambda: leader._planner.plan == follower._planner.plan)


async def test_start_without_etcd_publishes_the_saved_plan(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with healthy_node() as (sql, status):
        await register_node(client, sql, status)
        async with run_engine(replica_settings(tmp_path, "a", etcd)) as a:
            await wait_for_state(a, sql, "active")
            await a.operations.drain(sql)
            await wait_until(lambda: a._planner.saved_plan is not None)
        await etcd.terminate()
        async with run_engine(replica_settings(tmp_path, "a", etcd)) as a:
            async with FakeEnvoy(a.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: endpoints.get(sql, ("",))[0] == "DRAINING")
            assert a.cluster.node(sql).drain is not None
            with pytest.raises(StateUnavailable):
                await a.operations.undrain(sql)
            await etcd.launch()
            await wait_until(lambda: is_leader(a))
            await a.operations.undrain(sql)
            await wait_for_state(a, sql, "active")


async def test_mirror_lists_again_after_compaction(etcd: Etcd, client: EtcdClient) -> None:
    outages: list[str] = []
    async with EtcdClient([etcd.url]) as mirror_client:
        mirror = EtcdMirror(mirror_client, "/tidevoy/", on_change=lambda: None, on_outage=outages.append)
        for number in range(3):
            mirror_task = asyncio.create_task(mirror.run())
            await wait_until(lambda: mirror.is_current)
            mirror_task.cancel()
            await asyncio.wait({mirror_task})
            mirror.is_current = False
            await client.put(f"/tidevoy/{number}", b"value")
            await client.delete(f"/tidevoy/{number - 1}")
            await compact(etcd, await client.put("/other", b""))
        mirror_task = asyncio.create_task(mirror.run())
        await wait_until(lambda: list(mirror.entries) == ["/tidevoy/2"])
        await client.put("/tidevoy/3", b"value")
        await wait_until(lambda: list(mirror.entries) == ["/tidevoy/2", "/tidevoy/3"])
        mirror_task.cancel()
        await asyncio.wait({mirror_task})
    assert outages == []


async def test_duplicate_replica_name_emits_an_event(tmp_path: Path, etcd: Etcd) -> None:
    async with run_engine(replica_settings(tmp_path / "1", "a", etcd)) as first:
        await wait_until(lambda: is_leader(first))
        async with run_engine(replica_settings(tmp_path / "2", "a", etcd)):
            event = await EventRecorder(first).wait_for("replica.duplicate")
            assert "give each control plane its own replicas.name" in event.message

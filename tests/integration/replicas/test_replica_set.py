"""Several engines over one etcd: one decides, all publish the same, and what one is asked all do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.engine.engine import Engine
from controlplane.errors import NeedsModule, StateUnavailable
from controlplane.etcd.client import EtcdClient
from controlplane.model.intents import OnDeadline
from controlplane.storage.etcd_mirror import Mirror
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import SimulatedEnvoy, Told, becomes, node, register, running, settings
from tests.support.controlplane.etcd_compaction import compact
from tests.support.controlplane.replicas import engines, leads, replica, stopped
from tests.support.waiting import never, until


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.url]) as client:
        yield client


def published(engine: Engine) -> list[str]:
    """What an engine offers its own Envoys."""
    return sorted({status.published_version for status in engine._xds.statuses()})


def published_gauge(engine: Engine) -> float | None:
    return engine.registry.get_sample_value("tidevoy_published")


async def test_all_publish_the_leaders_plan(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with node() as (sql, status), node() as (second, second_status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            async with (
                SimulatedEnvoy(leader.xds_port, "envoy-1") as one,
                SimulatedEnvoy(follower.xds_port, "envoy-2") as two,
            ):
                await register(client, second, second_status)
                for engine, envoy in ((leader, one), (follower, two)):
                    await becomes(engine, second, "active")
                    await envoy.until(lambda endpoints: len(endpoints) == 2)
                await until(lambda: published(leader) == published(follower))
                assert leader._planner.plan == follower._planner.plan
            decisions = "tidevoy_plan_duration_seconds_count"
            assert follower.registry.get_sample_value(decisions) == 0.0
            assert leader.registry.get_sample_value("tidevoy_leader") == 1.0
            assert follower.registry.get_sample_value("tidevoy_leader") == 0.0
            event = await Told(follower).find("node.state")
            assert event.subject in (sql, second)


async def test_no_node_is_drained_while_a_control_plane_is_not_heard(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    """Its Envoys may have sessions there, and nobody knows of them."""
    async with (
        node() as (sql, status),
        running(replica(tmp_path, "a", etcd)) as leader,
        SimulatedEnvoy(leader.xds_port, "e1"),
    ):
        await register(client, sql, status)
        await until(lambda: leads(leader))
        await becomes(leader, sql, "active")
        unheard = {"enabled": True, "name": "b", "advertise": "127.0.0.1:1"}
        async with running(settings(tmp_path / "b", pd={"urls": [etcd.url]}, replicas=unheard)) as other:
            await becomes(other, sql, "active")
            await until(lambda: len(leader.replicas()) == 2)
            async with SimulatedEnvoy(other.xds_port, "e2") as busy:
                busy.sessions[sql] = 3
                await until(lambda: other.node(sql).sessions == 3)
                await leader.drain(sql)
                await never(lambda: leader.node(sql).plan.state.value == "drained", 4.0)
                assert leader.registry.get_sample_value("tidevoy_replicas_unheard") == 1
        await becomes(leader, sql, "drained")
        assert leader.registry.get_sample_value("tidevoy_replicas_unheard") == 0


async def test_what_any_of_them_is_asked_is_in_force_when_it_answers(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd, "abc") as (leader, *followers):
            for engine in followers:
                await becomes(engine, sql, "active")
                view = await engine.drain(sql)
                assert view.plan.state.value in ("draining", "drained")
                view = await leader.undrain(sql)
                assert view.plan.state.value == "active"
                await until(lambda engine=engine: not engine._intentions.now.drains)  # type: ignore[misc]
                view = await engine.amend(sql, weight=7)
                assert view.weight == 7
                await leader.amend(sql, weight=100)
                await becomes(engine, sql, "active")


async def test_drains_from_all_sides_at_once_all_count(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with engines(tmp_path, etcd, "abc") as all_:
        addresses = [f"10.0.0.{number}:4000" for number in range(24)]
        await asyncio.gather(
            *(all_[number % 3].add(address) for number, address in enumerate(addresses)),
        )
        for engine in all_:
            await until(lambda engine=engine: len(engine.nodes()) == 24)  # type: ignore[misc]


async def test_a_drain_waits_for_the_envoys_of_all(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            async with SimulatedEnvoy(follower.xds_port, "envoy-2") as envoy:
                envoy.sessions = {sql: 3}
                await envoy.until(bool)
                await until(lambda: leader.node(sql).sessions == 3)
                await leader.drain(sql)
                await envoy.until(lambda endpoints: endpoints[sql][0] == "DRAINING")
                await never(lambda: leader.node(sql).plan.state.value == "drained", 0.5)
                assert leader.node(sql).sessions == 3
                envoy.sessions = {}
                await becomes(leader, sql, "drained")
                await becomes(follower, sql, "drained")


async def test_all_demand_the_module_of_all_envoys(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            async with SimulatedEnvoy(leader.xds_port, "envoy-1"):
                await until(lambda: bool(follower.envoys()))
                with pytest.raises(NeedsModule, match="envoy-1"):
                    await follower.drain(sql, on_deadline=OnDeadline.CLOSE)


async def test_a_leader_that_ends_is_followed_at_once(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    loop = asyncio.get_running_loop()
    async with node() as (sql, status):
        await register(client, sql, status)
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            a = await first.enter_async_context(running(replica(tmp_path, "a", etcd)))
            await until(lambda: leads(a))
            b = await stack.enter_async_context(running(replica(tmp_path, "b", etcd)))
            await becomes(b, sql, "active")
            envoy = await stack.enter_async_context(SimulatedEnvoy(b.xds_port, "envoy-2"))
            await envoy.until(bool)
            await b.drain(sql)
            before = a.leadership.term
            told = len(envoy.published)
            began = loop.time()
            await first.aclose()
            await until(lambda: leads(b))
            assert loop.time() - began < 2.0
            assert (before or 0) < (b.leadership.term or 0)
            await until(lambda: [view.name for view in b.replicas()] == ["b"])
            await becomes(b, sql, "drained")
            # No resource was withdrawn, and the drain was never taken back.
            assert all(each[sql][0] == "DRAINING" for each in envoy.published[told:])
            assert (await Told(b).find("replica.left")).subject == "a"


async def test_one_that_joins_gets_what_is_published(tmp_path: Path, etcd: Etcd, client: EtcdClient) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with running(replica(tmp_path, "a", etcd)) as a:
            await becomes(a, sql, "active")
            async with SimulatedEnvoy(a.xds_port, "envoy-1") as one:
                await one.until(bool)
                await until(lambda: a._planner.saved is not None)
                async with (
                    running(replica(tmp_path, "b", etcd)) as b,
                    SimulatedEnvoy(b.xds_port, "envoy-2") as two,
                ):
                    await two.until(lambda endpoints: sql in endpoints)
                    await until(lambda: published(a) == published(b))
                    assert two.published[0] == one.endpoints
                    assert not leads(b)
                    await until(lambda: len(a.replicas()) == 2)
                    shown = {(view.name, view.leads, view.is_us) for view in b.replicas()}
                    assert shown == {("a", True, False), ("b", False, True)}


async def test_that_there_is_no_node_is_shared_too(tmp_path: Path, etcd: Etcd) -> None:
    async with engines(tmp_path, etcd) as (_, follower):
        await until(lambda: follower.unready() == ["no node is active"])
        assert published_gauge(follower) == 1.0


async def test_one_cancelled_at_any_time_leaves_nothing_behind(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    kept = asyncio.all_tasks()
    led = set()
    for turns in [*range(0, 60, 4), *range(60, 300, 30)]:
        engine = Engine(replica(tmp_path, "a", etcd))
        run = asyncio.create_task(engine.run())
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 60 else 0.0005)
        led.add(leads(engine))
        run.cancel()
        await asyncio.wait({run}, timeout=10)
        assert run.cancelled(), turns
        await until(lambda: asyncio.all_tasks() <= kept, 5)
        assert not leads(engine)
        entries = (await client.range("/tidevoy/")).entries
        assert entries.keys() <= {"/tidevoy/plan", "/tidevoy/intents"}, turns
    assert led == {True, False}


async def test_whose_lease_is_gone_begins_a_new_term_or_follows(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with engines(tmp_path, etcd) as (leader, follower):
        term = leader.leadership.term or 0
        lease = leader._replicas._lease.id  # type: ignore[union-attr]
        await client.lease_revoke(lease or 0)
        await until(lambda: any((engine.leadership.term or 0) > term for engine in (leader, follower)))
        await until(lambda: sum(map(leads, (leader, follower))) == 1)
        for engine in (leader, follower):
            await until(lambda engine=engine: len(engine.replicas()) == 2)  # type: ignore[misc]
        await leader.add("10.0.0.1:4000")
        await follower.add("10.0.0.2:4000")
        for engine in (leader, follower):
            await until(lambda engine=engine: len(engine.nodes()) == 2)  # type: ignore[misc]


async def test_who_cannot_read_the_plan_decides_alone_until_it_is_mended(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            await client.put("/tidevoy/plan", b"{}")
            assert "cannot read" in (await Told(follower).find("replica.alone")).message
            assert "the plan in PD" in (await Told(leader).find("state.damaged")).message
            await follower.drain(sql)  # it is in force all the same
            for engine in (leader, follower):
                await becomes(engine, sql, "drained")
            await client.delete("/tidevoy/plan")
            await until(lambda: not follower._planner.first.open or follower._planner.stands_by)
            await follower.undrain(sql)
            for engine in (leader, follower):
                await becomes(engine, sql, "active")
            await until(lambda: leader._planner.plan == follower._planner.plan)


async def test_what_was_asked_for_outlives_a_hand_that_deletes_it(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with engines(tmp_path, etcd) as (leader, follower):
            await becomes(follower, sql, "active")
            await leader.drain(sql)
            await client.delete("/tidevoy/intents")
            await follower.amend(sql, weight=7)
            for engine in (leader, follower):
                await until(lambda engine=engine: engine.node(sql).weight == 7)  # type: ignore[misc]
                assert engine.node(sql).drain is not None


# --- without etcd ---


async def test_while_etcd_is_silent_all_serve_and_nothing_is_half_done(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    loop = asyncio.get_running_loop()
    async with node() as (sql, status), node() as (second, second_status):
        await register(client, sql, status)
        await register(client, second, second_status)
        async with engines(tmp_path, etcd) as (leader, follower):
            for engine in (leader, follower):
                await becomes(engine, sql, "active")
                await becomes(engine, second, "active")
            async with (
                SimulatedEnvoy(leader.xds_port, "envoy-1") as one,
                SimulatedEnvoy(follower.xds_port, "envoy-2") as two,
            ):
                await one.until(lambda endpoints: len(endpoints) == 2)
                await two.until(lambda endpoints: len(endpoints) == 2)
                async with stopped(etcd.process):
                    for engine in (leader, follower):
                        began = loop.time()
                        with pytest.raises(StateUnavailable):
                            await engine.drain(sql)
                        assert loop.time() - began < 5.0
                        assert engine.node(sql).drain is None
                        assert engine.unready() == []
                    await until(lambda: not leads(leader))  # no rollout acts any more
                    assert leader.node(sql).plan.state.value == "active"
                    async with SimulatedEnvoy(follower.xds_port, "envoy-3") as three:
                        await three.until(lambda endpoints: len(endpoints) == 2)
                await until(lambda: leads(leader) or leads(follower))
                now = [engine for engine in (leader, follower) if leads(engine)]
                assert len(now) == 1
                for engine in (leader, follower):
                    assert engine.node(sql).drain is None
                await (follower if now == [leader] else leader).drain(sql)
                for envoy in (one, two):
                    await envoy.until(lambda endpoints: endpoints[sql][0] == "DRAINING")
                await until(lambda: leader._planner.plan == follower._planner.plan)


async def test_a_leader_without_etcd_still_cares_for_its_own_envoys(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with contextlib.AsyncExitStack() as dying, node() as (second, second_status):
        sql, status = await dying.enter_async_context(node())
        await register(client, sql, status)
        await register(client, second, second_status)
        async with engines(tmp_path, etcd) as (leader, follower):
            for engine in (leader, follower):
                await becomes(engine, sql, "active")
            async with SimulatedEnvoy(leader.xds_port) as envoy:
                await envoy.until(lambda endpoints: sql in endpoints)
                async with stopped(etcd.process):
                    await until(lambda: not leads(leader))
                    await dying.aclose()
                    await becomes(leader, sql, "unhealthy")
                    await envoy.until(lambda endpoints: endpoints[sql][0] == "UNHEALTHY")
                    alone = await Told(leader).find("replica.alone")
                    assert alone.subject in [view.name for view in leader.replicas() if view.is_us]
                await until(lambda: leads(leader) or leads(follower))
                await becomes(follower, sql, "unhealthy")
                await until(lambda: leader._planner.plan == follower._planner.plan)


async def test_a_start_without_etcd_publishes_what_was_known(
    tmp_path: Path, etcd: Etcd, client: EtcdClient
) -> None:
    async with node() as (sql, status):
        await register(client, sql, status)
        async with running(replica(tmp_path, "a", etcd)) as a:
            await becomes(a, sql, "active")
            await a.drain(sql)
            await until(lambda: a._planner.saved is not None)
        await etcd.terminate()
        async with running(replica(tmp_path, "a", etcd)) as a:
            async with SimulatedEnvoy(a.xds_port) as envoy:
                await envoy.until(lambda endpoints: endpoints.get(sql, ("",))[0] == "DRAINING")
            assert a.node(sql).drain is not None
            with pytest.raises(StateUnavailable):
                await a.undrain(sql)
            await etcd.launch()
            await until(lambda: leads(a))
            await a.undrain(sql)
            await becomes(a, sql, "active")


async def test_compacted_changes_are_listed_again(etcd: Etcd, client: EtcdClient) -> None:
    outages: list[str] = []
    async with EtcdClient([etcd.url]) as ours:
        mirror = Mirror(ours, "/tidevoy/", on_change=lambda: None, on_outage=outages.append)
        for number in range(3):
            following = asyncio.create_task(mirror.run())
            await until(lambda: mirror.stands)
            following.cancel()
            await asyncio.wait({following})
            mirror.stands = False
            await client.put(f"/tidevoy/{number}", b"there")
            await client.delete(f"/tidevoy/{number - 1}")
            await compact(etcd, await client.put("/other", b""))
        following = asyncio.create_task(mirror.run())
        await until(lambda: list(mirror.entries) == ["/tidevoy/2"])
        await client.put("/tidevoy/3", b"heard")
        await until(lambda: list(mirror.entries) == ["/tidevoy/2", "/tidevoy/3"])
        following.cancel()
        await asyncio.wait({following})
    assert outages == []


async def test_who_shares_a_name_is_told(tmp_path: Path, etcd: Etcd) -> None:
    async with running(replica(tmp_path / "1", "a", etcd)) as first:
        await until(lambda: leads(first))
        async with running(replica(tmp_path / "2", "a", etcd)):
            event = await Told(first).find("replica.duplicate")
            assert "replicas.name of its own" in event.message

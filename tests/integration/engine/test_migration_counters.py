"""Migrated sessions count at their new node, and no node looks empty before its counts are known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.version import VERSION
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    fast_clock,
    healthy_node,
    reporting_module,
    run_engine,
    settings,
    wait_for_plans,
    wait_for_state,
)
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    FakeStatusPort,
    mysql_packet,
    run_fake_server,
    send_parts,
)
from tests.support.waiting import wait_until

# The engine's clock runs this many times faster, so that the migration timeout ends within a second.
CLOCK_SPEED = 20


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[str, str]]:
    async with healthy_node() as (one, _), healthy_node() as (other, _):
        yield one, other


def two_node_settings(tmp_path: Path, nodes: tuple[str, str]) -> Settings:
    return settings(tmp_path, nodes=[{"address": address} for address in nodes])


async def assert_stays(engine: Engine, address: str, state: str) -> None:
    """Assert that the node is in this state and keeps it over several decisions."""
    await wait_for_plans(engine)
    assert engine.cluster.node(address).plan.state == state


async def test_node_is_drained_when_its_sessions_have_migrated(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    source, target = nodes
    async with run_engine(two_node_settings(tmp_path, nodes), clock=fast_clock(CLOCK_SPEED)) as engine:
        await wait_for_state(engine, source, "active")
        await wait_for_state(engine, target, "active")
        async with (
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
            reporting_module(engine, {source: 3, target: 0}) as module,
        ):
            envoy.sessions = {source: 3}  # load reports always count a session at its first node
            await wait_until(
                lambda: (engine.cluster.node(source).sessions, engine.cluster.node(target).sessions) == (3, 0)
            )
            await engine.operations.drain(source)
            await assert_stays(engine, source, "draining")
            module.counts = {source: 0, target: 3}
            await wait_for_state(engine, source, "drained")
            assert (engine.cluster.node(source).sessions, engine.cluster.node(target).sessions) == (0, 3)
            assert [view.sessions for view in engine.cluster.envoys()] == [3]
            # Load reports show no session on the target, but the module's reports show three.
            await engine.operations.drain(target)
            await assert_stays(engine, target, "draining")
            module.counts = {source: 1, target: 2}  # a session appears on the drained node
            await wait_for_state(engine, source, "draining")


async def test_partial_module_report_never_drains_a_node(tmp_path: Path, nodes: tuple[str, str]) -> None:
    first, second = nodes
    async with run_engine(two_node_settings(tmp_path, nodes), clock=fast_clock(CLOCK_SPEED)) as engine:
        await wait_for_state(engine, second, "active")
        async with FakeEnvoy(engine.xds_port, module=VERSION) as envoy:
            envoy.sessions = {first: 1}
            await wait_until(lambda: engine.cluster.node(first).sessions == 1)
            await engine.operations.drain(second)
            await assert_stays(engine, second, "draining")  # the Envoy's module has not reported yet
            async with reporting_module(engine, {first: 0}) as module:
                module.completes_flushes = False
                await assert_stays(engine, second, "draining")
                assert engine.cluster.node(first).sessions == 1  # from the load report
                module.counts, module.completes_flushes = {first: 0, second: 1}, True
                await wait_until(lambda: engine.cluster.node(second).sessions == 1)
                await assert_stays(engine, second, "draining")
            # The Envoy's metrics stream breaks. The next stream starts with a partial flush.
            async with reporting_module(engine, {first: 0}) as module:
                module.completes_flushes = False
                await assert_stays(engine, second, "draining")
                assert engine.cluster.node(second).sessions == 1
                module.counts, module.completes_flushes = {first: 1, second: 0}, True
                await wait_for_state(engine, second, "drained")


async def test_envoy_restarted_without_module_counts_by_load_reports(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    first, second = nodes
    async with run_engine(two_node_settings(tmp_path, nodes), clock=fast_clock(CLOCK_SPEED)) as engine:
        await wait_for_state(engine, first, "active")
        async with (
            FakeEnvoy(engine.xds_port, module=VERSION),
            reporting_module(engine, {first: 2, second: 0}),
        ):
            await wait_until(lambda: engine.cluster.node(first).sessions == 2)
        await engine.operations.drain(first)
        await assert_stays(engine, first, "draining")
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_until(lambda: engine.cluster.node(first).sessions == 0)
            await wait_for_state(engine, first, "drained")
            envoy.sessions = {second: 1}
            await wait_until(lambda: engine.cluster.node(second).sessions == 1)


async def test_migration_blocker_emits_an_event(tmp_path: Path) -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        run_fake_server(FakeStatusPort()) as status,
        run_engine(
            settings(tmp_path, nodes=[{"address": sql.endpoint, "status_address": status.endpoint}])
        ) as engine,
    ):
        event = await EventRecorder(engine).wait_for("node.migration_blocker")
        (blocker,) = engine.cluster.node(sql.endpoint).health.migration_blockers
        assert (event.subject, event.message) == (sql.endpoint, f"{sql.endpoint}: {blocker}")


async def test_module_without_sessions_leaves_counting_to_load_reports(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    """For example, an Envoy that has loaded the module may have rejected the listener that uses it."""
    first, _ = nodes
    async with run_engine(two_node_settings(tmp_path, nodes), clock=fast_clock(CLOCK_SPEED)) as engine:
        await wait_for_state(engine, first, "active")
        async with FakeEnvoy(engine.xds_port, module=VERSION) as envoy, reporting_module(engine, {}):
            envoy.sessions = {first: 1}
            await wait_until(lambda: engine.cluster.node(first).sessions == 1)
            await engine.operations.drain(first)
            await assert_stays(engine, first, "draining")
            envoy.sessions = {}
            await wait_for_state(engine, first, "drained")

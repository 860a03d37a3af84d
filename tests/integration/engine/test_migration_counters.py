"""Sessions that have moved are counted where they are, and no node looks empty before that is known."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.version import VERSION
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
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

# Times the speed of the engine's clock: what a move may take passes in less than a second.
LAPSE = 20


def lapse() -> float:
    return LAPSE * time.monotonic()


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[str, str]]:
    async with healthy_node() as (one, _), healthy_node() as (other, _):
        yield one, other


def wanted(tmp_path: Path, nodes: tuple[str, str]) -> Settings:
    return settings(tmp_path, nodes=[{"address": address} for address in nodes])


async def stays(engine: Engine, address: str, state: str) -> None:
    """The node is in that state, and is decided on again and again without coming into another."""
    await wait_for_plans(engine)
    assert engine.node(address).plan.state == state


async def test_a_node_is_drained_when_its_sessions_have_moved(tmp_path: Path, nodes: tuple[str, str]) -> None:
    left, reached = nodes
    async with run_engine(wanted(tmp_path, nodes), clock=lapse) as engine:
        await wait_for_state(engine, left, "active")
        await wait_for_state(engine, reached, "active")
        async with (
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
            reporting_module(engine, {left: 3, reached: 0}) as module,
        ):
            envoy.sessions = {left: 3}  # for ever, as Envoy sees it
            await wait_until(lambda: (engine.node(left).sessions, engine.node(reached).sessions) == (3, 0))
            await engine.drain(left)
            await stays(engine, left, "draining")
            module.counts = {left: 0, reached: 3}
            await wait_for_state(engine, left, "drained")
            assert (engine.node(left).sessions, engine.node(reached).sessions) == (0, 3)
            assert [view.sessions for view in engine.envoys()] == [3]
            # Envoy has nothing to tell of them there, and yet they are.
            await engine.drain(reached)
            await stays(engine, reached, "draining")
            module.counts = {left: 1, reached: 2}  # it had been on its way for long
            await wait_for_state(engine, left, "draining")


async def test_nothing_looks_empty_while_a_module_has_told_a_part(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    first, second = nodes
    async with run_engine(wanted(tmp_path, nodes), clock=lapse) as engine:
        await wait_for_state(engine, second, "active")
        async with FakeEnvoy(engine.xds_port, module=VERSION) as envoy:
            envoy.sessions = {first: 1}
            await wait_until(lambda: engine.node(first).sessions == 1)
            await engine.drain(second)
            await stays(engine, second, "draining")  # it has a module, which has told nothing
            async with reporting_module(engine, {first: 0}) as module:
                module.completes_flushes = False
                await stays(engine, second, "draining")
                assert engine.node(first).sessions == 1  # by the load report still
                module.counts, module.completes_flushes = {first: 0, second: 1}, True
                await wait_until(lambda: engine.node(second).sessions == 1)
                await stays(engine, second, "draining")
            # The Envoy's stream broke, and its next one begins with what comes first.
            async with reporting_module(engine, {first: 0}) as module:
                module.completes_flushes = False
                await stays(engine, second, "draining")
                assert engine.node(second).sessions == 1
                module.counts, module.completes_flushes = {first: 1, second: 0}, True
                await wait_for_state(engine, second, "drained")


async def test_an_envoy_that_is_started_again_without_the_module_is_believed_by_its_load_reports(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    first, second = nodes
    async with run_engine(wanted(tmp_path, nodes), clock=lapse) as engine:
        await wait_for_state(engine, first, "active")
        async with (
            FakeEnvoy(engine.xds_port, module=VERSION),
            reporting_module(engine, {first: 2, second: 0}),
        ):
            await wait_until(lambda: engine.node(first).sessions == 2)
        await engine.drain(first)
        await stays(engine, first, "draining")
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_until(lambda: engine.node(first).sessions == 0)
            await wait_for_state(engine, first, "drained")
            envoy.sessions = {second: 1}
            await wait_until(lambda: engine.node(second).sessions == 1)


async def test_a_node_whose_sessions_cannot_move_is_told_of(tmp_path: Path) -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        run_fake_server(FakeStatusPort()) as status,
        run_engine(
            settings(tmp_path, nodes=[{"address": sql.endpoint, "status_address": status.endpoint}])
        ) as engine,
    ):
        told = await EventRecorder(engine).wait_for("node.hindrance")
        (hindrance,) = engine.node(sql.endpoint).health.migration_blockers
        assert (told.subject, told.message) == (sql.endpoint, f"{sql.endpoint}: {hindrance}")


async def test_a_module_that_has_no_session_leaves_counting_to_its_envoy(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    """As one that is loaded, and whose listener the Envoy has refused."""
    first, _ = nodes
    async with run_engine(wanted(tmp_path, nodes), clock=lapse) as engine:
        await wait_for_state(engine, first, "active")
        async with FakeEnvoy(engine.xds_port, module=VERSION) as envoy, reporting_module(engine, {}):
            envoy.sessions = {first: 1}
            await wait_until(lambda: engine.node(first).sessions == 1)
            await engine.drain(first)
            await stays(engine, first, "draining")
            envoy.sessions = {}
            await wait_for_state(engine, first, "drained")

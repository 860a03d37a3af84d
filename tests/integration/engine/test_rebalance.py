"""Sessions are asked to move to a node that has joined: from what modules tell to what Envoys get."""

from __future__ import annotations

import time
from pathlib import Path

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
from tests.support.waiting import wait_until

# Times the speed of the engine's clock: a round passes in a second.
LAPSE = 5
INSTANCE = "00c0ffee00c0ffee"


def lapse() -> float:
    return LAPSE * time.monotonic()


async def test_a_node_that_joins_gets_its_share_and_everybody_can_see_why(tmp_path: Path) -> None:
    async with healthy_node() as (old, _), healthy_node() as (new, _):
        wanted = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        async with (
            run_engine(wanted, clock=lapse) as engine,
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await wait_for_state(engine, old, "active")
            await wait_for_state(engine, new, "active")
            counts = {old: 20, new: 0}
            async with reporting_module(engine, counts, INSTANCE):
                told = EventRecorder(engine)
                begun = await told.wait_for("balance.rebalance")
                assert begun.data["asked"] == {old: 10}
                assert (engine.node(old).rebalancing_sessions, engine.node(new).rebalancing_sessions) == (
                    10,
                    0,
                )
                labels = {"node": old}
                assert engine.registry.get_sample_value("tidevoy_node_rebalance_sessions", labels) == 10
                await wait_until(
                    lambda: bool(envoy.requested_migrations) and bool(envoy.requested_migrations[-1])
                )
                (text,) = {text for moves in envoy.requested_migrations for text in moves.values()}
                round_number, _, asked = text.partition(":")
                assert (int(round_number) > 0, asked) == (True, f"{INSTANCE}=10")
                counts.update({old: 10, new: 10})
                over = await told.wait_for("balance.rebalance_over")
                assert "all nodes have about their share" in over.message
                await wait_until(lambda: not envoy.requested_migrations[-1])
                assert engine.node(old).rebalancing_sessions == 0


async def test_an_older_module_is_asked_for_nothing_nor_is_anybody_when_it_is_switched_off(
    tmp_path: Path,
) -> None:
    async with healthy_node() as (old, _), healthy_node() as (new, _):
        wanted = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        off = wanted.model_copy(update={"rebalance": wanted.rebalance.model_copy(update={"enabled": False})})
        async with (
            run_engine(wanted, clock=lapse, load_settings=lambda: off) as engine,
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await wait_for_state(engine, new, "active")
            async with reporting_module(engine, {old: 20, new: 0}):
                await wait_until(lambda: engine.node(old).sessions == 20)
                await wait_for_plans(engine)
                assert not any(envoy.requested_migrations)
            async with reporting_module(engine, {old: 20, new: 0}, INSTANCE):
                await EventRecorder(engine).wait_for("balance.rebalance")
                await engine.reload()
                over = await EventRecorder(engine).wait_for("balance.rebalance_over")
                assert over.message.endswith("it was switched off")
                await wait_until(lambda: not envoy.requested_migrations[-1])

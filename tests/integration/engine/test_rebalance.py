"""Sessions are asked to move to a node that has joined: from what modules tell to what Envoys get."""

from __future__ import annotations

import time
from pathlib import Path

from controlplane.version import VERSION
from tests.support.controlplane.engine import (
    SimulatedEnvoy,
    Told,
    becomes,
    decides,
    node,
    running,
    settings,
    telling,
)
from tests.support.waiting import until

# Times the speed of the engine's clock: a round passes in a second.
LAPSE = 5
INSTANCE = "00c0ffee00c0ffee"


def lapse() -> float:
    return LAPSE * time.monotonic()


async def test_a_node_that_joins_gets_its_share_and_everybody_can_see_why(tmp_path: Path) -> None:
    async with node() as (old, _), node() as (new, _):
        wanted = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        async with (
            running(wanted, clock=lapse) as engine,
            SimulatedEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await becomes(engine, old, "active")
            await becomes(engine, new, "active")
            counts = {old: 20, new: 0}
            async with telling(engine, counts, INSTANCE):
                told = Told(engine)
                begun = await told.find("balance.rebalance")
                assert begun.data["asked"] == {old: 10}
                assert (engine.node(old).rebalance, engine.node(new).rebalance) == (10, 0)
                labels = {"node": old}
                assert engine.registry.get_sample_value("tidevoy_node_rebalance_sessions", labels) == 10
                await until(lambda: bool(envoy.moves) and bool(envoy.moves[-1]))
                (text,) = {text for moves in envoy.moves for text in moves.values()}
                round_number, _, asked = text.partition(":")
                assert (int(round_number) > 0, asked) == (True, f"{INSTANCE}=10")
                counts.update({old: 10, new: 10})
                over = await told.find("balance.rebalance_over")
                assert "all nodes have about their share" in over.message
                await until(lambda: not envoy.moves[-1])
                assert engine.node(old).rebalance == 0


async def test_an_older_module_is_asked_for_nothing_nor_is_anybody_when_it_is_switched_off(
    tmp_path: Path,
) -> None:
    async with node() as (old, _), node() as (new, _):
        wanted = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        off = wanted.model_copy(update={"rebalance": wanted.rebalance.model_copy(update={"enabled": False})})
        async with (
            running(wanted, clock=lapse, load_settings=lambda: off) as engine,
            SimulatedEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await becomes(engine, new, "active")
            async with telling(engine, {old: 20, new: 0}):
                await until(lambda: engine.node(old).sessions == 20)
                await decides(engine)
                assert not any(envoy.moves)
            async with telling(engine, {old: 20, new: 0}, INSTANCE):
                await Told(engine).find("balance.rebalance")
                await engine.reload()
                over = await Told(engine).find("balance.rebalance_over")
                assert over.message.endswith("it was switched off")
                await until(lambda: not envoy.moves[-1])

"""Rebalancing to a new node: module reports lead to migration requests in the endpoints of Envoys."""

from __future__ import annotations

from pathlib import Path

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
from tests.support.waiting import wait_until

# The engine's clock runs this many times faster, so that a rebalancing round takes a second.
CLOCK_SPEED = 5
INSTANCE = "00c0ffee00c0ffee"


async def test_joining_node_gets_its_share_with_reasons(tmp_path: Path) -> None:
    async with healthy_node() as (old, _), healthy_node() as (new, _):
        config = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        async with (
            run_engine(config, clock=fast_clock(CLOCK_SPEED)) as engine,
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await wait_for_state(engine, old, "active")
            await wait_for_state(engine, new, "active")
            counts = {old: 20, new: 0}
            async with reporting_module(engine, counts, INSTANCE):
                recorder = EventRecorder(engine)
                started = await recorder.wait_for("balance.rebalance")
                assert started.data["asked"] == {old: 10}
                assert (
                    engine.cluster.node(old).rebalancing_sessions,
                    engine.cluster.node(new).rebalancing_sessions,
                ) == (
                    10,
                    0,
                )
                labels = {"node": old}
                assert engine.registry.get_sample_value("tidevoy_node_rebalance_sessions", labels) == 10
                await wait_until(
                    lambda: bool(envoy.requested_migrations) and bool(envoy.requested_migrations[-1])
                )
                (text,) = {text for requests in envoy.requested_migrations for text in requests.values()}
                round_number, _, requested = text.partition(":")
                assert (int(round_number) > 0, requested) == (True, f"{INSTANCE}=10")
                counts.update({old: 10, new: 10})
                finished = await recorder.wait_for("balance.rebalance_over")
                assert "all nodes have about their share" in finished.message
                await wait_until(lambda: not envoy.requested_migrations[-1])
                assert engine.cluster.node(old).rebalancing_sessions == 0


async def test_no_rebalancing_with_old_modules_or_when_disabled(
    tmp_path: Path,
) -> None:
    async with healthy_node() as (old, _), healthy_node() as (new, _):
        config = settings(tmp_path, nodes=[{"address": old}, {"address": new}])
        disabled_config = config.model_copy(
            update={"rebalance": config.rebalance.model_copy(update={"enabled": False})}
        )
        async with (
            run_engine(
                config, clock=fast_clock(CLOCK_SPEED), load_settings=lambda: disabled_config
            ) as engine,
            FakeEnvoy(engine.xds_port, module=VERSION) as envoy,
        ):
            await wait_for_state(engine, new, "active")
            async with reporting_module(engine, {old: 20, new: 0}):
                await wait_until(lambda: engine.cluster.node(old).sessions == 20)
                await wait_for_plans(engine)
                assert not any(envoy.requested_migrations)
            async with reporting_module(engine, {old: 20, new: 0}, INSTANCE):
                await EventRecorder(engine).wait_for("balance.rebalance")
                await engine.reload()
                finished = await EventRecorder(engine).wait_for("balance.rebalance_over")
                assert finished.message.endswith("rebalancing is disabled")
                await wait_until(lambda: not envoy.requested_migrations[-1])

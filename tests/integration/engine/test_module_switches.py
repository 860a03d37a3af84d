"""Switches of the module: the settings, and what operators set for one Envoy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import UnknownEnvoy
from controlplane.model.module_switches import ModuleSwitches, SwitchOverrides
from controlplane.version import VERSION
from tests.support.controlplane.engine import EventRecorder, FakeEnvoy, run_engine, settings
from tests.support.waiting import wait_until

NODES: list[dict[str, Any]] = [{"address": "10.0.0.1:4000"}]
UNCHECKED: dict[str, Any] = {"health": {"sql": {"enabled": False}, "status": {"enabled": False}}}


def module_settings(tmp_path: Path, **module: str) -> Settings:
    return settings(tmp_path, nodes=NODES, module=module, **UNCHECKED)


def module_envoy(engine: Engine, name: str) -> FakeEnvoy:
    return FakeEnvoy(engine.xds_port, name, module=VERSION)


async def wait_for_switched_off(envoy: FakeEnvoy, *parts: str) -> None:
    """Wait until the Envoy has a live configuration that switches off exactly these parts."""
    await wait_until(lambda: bool(envoy.live_configs) and envoy.switched_off == set(parts))


async def test_reload_switches_all_envoys(tmp_path: Path) -> None:
    module: dict[str, str] = {}
    async with (
        run_engine(
            module_settings(tmp_path), load_settings=lambda: module_settings(tmp_path, **module)
        ) as engine,
        module_envoy(engine, "one") as one,
        module_envoy(engine, "two") as two,
    ):
        await wait_for_switched_off(one)
        await wait_for_switched_off(two)
        module["offload"] = "off"
        assert (await engine.reload()).applied == ("module.offload",)
        for envoy in (one, two):
            await wait_for_switched_off(envoy, "offload")
        assert [view.switches for view in engine.cluster.envoys()] == [ModuleSwitches(offload=False)] * 2
        module.update(offload="on", migration="off")
        await engine.reload()
        for envoy in (one, two):
            await wait_for_switched_off(envoy, "migration")


async def test_override_applies_to_one_envoy_and_survives_a_restart(tmp_path: Path) -> None:
    off_for_all = module_settings(tmp_path, migration="off")
    async with (
        run_engine(off_for_all) as engine,
        module_envoy(engine, "one") as one,
        module_envoy(engine, "two") as two,
    ):
        await wait_for_switched_off(one, "migration")
        recorder = EventRecorder(engine)
        view = await engine.operations.set_envoy_switches("one", {"offload": False, "migration": True})
        assert view.switches == ModuleSwitches(offload=False)
        assert view.overrides == SwitchOverrides(offload=False, migration=True)
        assert (await recorder.wait_for("intent.envoy_switches")).subject == "one"
        await wait_for_switched_off(one, "offload")
        assert two.switched_off == {"migration"}
        with pytest.raises(UnknownEnvoy):
            await engine.operations.set_envoy_switches("three", {"offload": False})
    async with (
        run_engine(off_for_all) as engine,
        module_envoy(engine, "two") as two,
        module_envoy(engine, "one") as one,
    ):
        await wait_for_switched_off(one, "offload")
        assert all(config.get("offload") is False for config in one.live_configs)
        await wait_for_switched_off(two, "migration")
        await engine.operations.set_envoy_switches("one", {"offload": None, "migration": None})
        await wait_for_switched_off(one, "migration")
        assert engine.cluster.envoy("one").overrides == SwitchOverrides()

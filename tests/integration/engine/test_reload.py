"""Configuration reloads: each kind of change, and an invalid configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.config.settings import Settings
from controlplane.errors import ConfigError
from controlplane.metrics import logs
from controlplane.model.nodes import Source, State
from controlplane.model.views import ReloadResult
from tests.support.controlplane.engine import (
    FAST_CHECKS,
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until


class Configuration:
    """Loads the settings for the next reload, or raises `error` if it is set."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        self._tmp_path = tmp_path
        self.sections = sections
        self.error: ConfigError | None = None

    def __call__(self) -> Settings:
        if self.error is not None:
            raise self.error
        return settings(self._tmp_path, **self.sections)


@pytest.fixture
def log_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logs.set_level(logging.getLevelName(before).lower())


async def test_reload_adds_and_removes_nodes(tmp_path: Path) -> None:
    async with healthy_node() as (first, _), healthy_node() as (second, _):
        configuration = Configuration(tmp_path, nodes=[{"address": first}])
        async with run_engine(configuration(), load_settings=configuration) as engine:
            await wait_for_state(engine, first, "active")
            async with FakeEnvoy(engine.xds_port) as envoy:
                await envoy.wait_for_endpoints(lambda endpoints: first in endpoints)
                configuration.sections["nodes"] = [{"address": second, "weight": 7, "labels": {"zone": "a"}}]
                result = await engine.reload()
                assert result == ReloadResult(applied=("nodes",))
                assert engine.cluster.node(first).plan.state is State.GONE
                await wait_for_state(engine, second, "active")
                assert engine.cluster.node(second).weight == 7
                await wait_for_state(engine, first, None)
                await envoy.wait_for_endpoints(lambda endpoints: set(endpoints) == {second})
                configuration.sections["nodes"] = [{"address": second, "weight": 9}]
                await engine.reload()
                assert engine.cluster.node(second).weight == 9
                assert engine.cluster.node(second).plan.state is State.ACTIVE


async def test_configuration_takes_over_a_node_that_an_operator_added(
    tmp_path: Path,
) -> None:
    async with healthy_node() as (sql, _):
        configuration = Configuration(tmp_path)
        async with run_engine(configuration(), load_settings=configuration) as engine:
            await engine.operations.add(sql)
            configuration.sections["nodes"] = [{"address": sql, "weight": 300}]
            await engine.reload()
            view = engine.cluster.node(sql)
            assert (view.plan.node.source, view.weight) == (Source.STATIC, 300)


async def test_reload_reports_when_each_setting_takes_effect(tmp_path: Path) -> None:
    with refusing_port() as dead:
        configuration = Configuration(tmp_path, nodes=[{"address": dead}])
        async with run_engine(configuration(), load_settings=configuration) as engine:
            recorder = EventRecorder(engine)
            await wait_until(lambda: engine.cluster.node(dead).health.sql is not None)
            assert engine.cluster.node(dead).plan.state is State.JOINING
            configuration.sections |= {
                "health": {"status": FAST_CHECKS, "sql": {**FAST_CHECKS, "enabled": False}},
                "sql": {"keepalive_idle": 5, "access_log": "/dev/null"},
                "pd": {"urls": ["http://127.0.0.1:1"]},
            }
            result = await engine.reload()
            assert result.applied == ("health.sql.enabled",)
            assert result.applied_by_module == ("sql.keepalive_idle",)
            assert result.needs_new_envoys == ("sql.access_log",)
            assert result.needs_restart == ("pd.urls",)
            assert engine.settings.pd.urls == ()
            await wait_for_state(engine, dead, "active")  # the node is no longer checked
            message = (await recorder.wait_for("config.reloaded")).message
            assert "by Envoys with the module: sql.keepalive_idle" in message
            assert "Envoys that start from now on: sql.access_log" in message
            assert "after a restart of the control plane: pd.urls" in message
            assert (await engine.reload()).needs_restart == ("pd.urls",)


async def test_reload_changes_the_published_version(tmp_path: Path) -> None:
    configuration = Configuration(tmp_path)
    async with (
        run_engine(configuration(), load_settings=configuration) as engine,
        FakeEnvoy(engine.xds_port) as envoy,
    ):
        await envoy.wait_for_endpoints(lambda endpoints: True)
        before = engine.cluster.envoys()[0].status.published_version
        configuration.sections["backend"] = {"connect_timeout": 3}
        await engine.reload()
        await wait_until(lambda: engine.cluster.envoys()[0].status.published_version != before)


@pytest.mark.usefixtures("log_level")
async def test_reload_changes_the_log_level(tmp_path: Path) -> None:
    logger = logging.getLogger("tidevoy.engine")
    configuration = Configuration(tmp_path)
    async with run_engine(configuration(), load_settings=configuration) as engine:
        configuration.sections["log"] = {"level": "error"}
        assert (await engine.reload()).applied == ("log.level",)
        assert not logger.isEnabledFor(logging.WARNING)
        configuration.sections["log"] = {"level": "debug"}
        await engine.reload()
        assert logger.isEnabledFor(logging.DEBUG)


async def test_invalid_configuration_keeps_the_old_one(tmp_path: Path) -> None:
    async with healthy_node() as (sql, _):
        configuration = Configuration(tmp_path, nodes=[{"address": sql}])
        async with run_engine(configuration(), load_settings=configuration) as engine:
            await wait_for_state(engine, sql, "active")
            before = engine.settings
            configuration.error = ConfigError("tidevoy.yaml:3", "sql.listen", "it is wrong", "fix it")
            with pytest.raises(ConfigError):
                await engine.reload()
            event = await EventRecorder(engine).wait_for("config.rejected")
            assert "tidevoy.yaml:3: sql.listen: it is wrong; fix it" in event.message
            assert engine.settings is before
            assert engine.cluster.node(sql).plan.state is State.ACTIVE
            configuration.error = None
            await engine.reload()
            for result in ("rejected", "applied"):
                labels = {"result": result}
                assert engine.registry.get_sample_value("tidevoy_config_reloads_total", labels) == 1


async def test_reload_without_loader_changes_nothing(tmp_path: Path) -> None:
    async with run_engine(settings(tmp_path)) as engine:
        result = await engine.reload()
        assert result == ReloadResult()

"""The metrics of a running engine: all series exist, and labels are limited to known nodes and Envoys."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest

from controlplane.engine.engine import Engine
from tests.support.controlplane.engine import (
    UNREACHABLE_PD_URL,
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.waiting import wait_until

SERIES = {
    "tidevoy_nodes",
    "tidevoy_node_in_service",
    "tidevoy_node_weight",
    "tidevoy_node_capacity",
    "tidevoy_node_sessions",
    "tidevoy_node_connections",
    "tidevoy_node_rebalance_sessions",
    "tidevoy_node_state_changes_total",
    "tidevoy_envoy_connected",
    "tidevoy_envoy_up_to_date",
    "tidevoy_envoy_sessions",
    "tidevoy_source_up",
    "tidevoy_source_problems",
    "tidevoy_source_other_keyspace_nodes",
    "tidevoy_panic_threshold_active",
    "tidevoy_plan_published",
    "tidevoy_events_total",
    "tidevoy_plan_duration_seconds_count",
    "tidevoy_plan_saves_failed_total",
    "process_resident_memory_bytes",
    "python_gc_collections_total",
}


def lines(engine: Engine) -> list[str]:
    text = generate_latest(engine.registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def value(engine: Engine, name: str, **labels: str) -> float | None:
    return engine.registry.get_sample_value(name, labels)


async def test_all_series_exist_and_series_of_deleted_nodes_disappear(tmp_path: Path) -> None:
    async with healthy_node() as (sql, status), run_engine(settings(tmp_path)) as engine:
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_until(lambda: bool(engine.cluster.envoys()))
            await engine.operations.add(sql, status_address=status, weight=40)
            await wait_for_state(engine, sql, "active")
            envoy.sessions[sql] = 2
            await wait_until(lambda: engine.cluster.node(sql).sessions == 2)
            await wait_until(lambda: engine.cluster.node(sql).connections == 3)
            series = {re.split(r"[ {]", line)[0] for line in lines(engine)}
            assert series >= SERIES
            assert value(engine, "tidevoy_nodes", state="active") == 1
            assert value(engine, "tidevoy_node_capacity", node=sql) == 40
            assert value(engine, "tidevoy_node_sessions", node=sql) == 2
            assert value(engine, "tidevoy_node_connections", node=sql) == 3
            assert value(engine, "tidevoy_envoy_sessions", envoy="envoy-1") == 2
            assert value(engine, "tidevoy_node_state_changes_total", node=sql, state="active") == 1
            envoy.sessions.clear()
            await engine.operations.remove(sql)
            await wait_for_state(engine, sql, None)
            remaining = [line for line in lines(engine) if sql in line]
            assert remaining == []
        await wait_until(lambda: value(engine, "tidevoy_envoy_connected", envoy="envoy-1") == 0)


async def test_label_names_are_bounded(tmp_path: Path) -> None:
    async with (
        healthy_node() as (sql, _),
        run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine,
        FakeEnvoy(engine.xds_port, 'an "envoy"\n'),
    ):
        await wait_for_state(engine, sql, "active")
        await EventRecorder(engine).wait_for("envoy.connected")
        # This series exists from the start, because an alert uses its increase.
        assert value(engine, "tidevoy_events_total", kind="envoy.denied") == 0
        names = {name for line in lines(engine) for name in re.findall(r'[{,](\w+)="', line)}
        label_names = {"kind", "phase", "result", "stage", "state", "le", "generation"}
        assert names <= {"node", "envoy", "source", *label_names}


async def test_pd_outage_is_exported(tmp_path: Path) -> None:
    async with run_engine(settings(tmp_path, pd={"urls": [UNREACHABLE_PD_URL]})) as engine:
        await EventRecorder(engine).wait_for("source.outage")
        assert value(engine, "tidevoy_source_up", source="pd") == 0
        assert value(engine, "tidevoy_source_up", source="static") == 1
        assert value(engine, "tidevoy_plan_published") == 0

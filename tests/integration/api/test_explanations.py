"""The explanation of a node's share of new sessions, over HTTP and as a CLI table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cli.main import run
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings, stored_events
from tests.support.controlplane.node_metrics import FakeMetricsNode, run_fake_metrics_node

BALANCE = {"slow_start": 0, "metrics": {"interval": 0.1}}
FACTOR_ORDER = ["state", "labels", "health", "memory", "cpu", "location", "connections"]


@pytest.fixture
async def metrics_nodes() -> AsyncIterator[list[FakeMetricsNode]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_fake_metrics_node()) for _ in range(2)]


@pytest.fixture
async def server(
    tmp_path: Path, ports: Ports, metrics_nodes: list[FakeMetricsNode]
) -> AsyncIterator[ApiServer]:
    nodes = [{"address": node.address, "status_address": node.status} for node in metrics_nodes]
    health = {"sql": {"interval": 0.1}, "status": {"interval": 0.1}}
    defaults = settings(tmp_path, ports, balance=BALANCE, health=health)
    with_nodes = type(defaults).model_validate(defaults.model_dump() | {"nodes": nodes})
    async with run_api_server(with_nodes) as server:
        yield server


def factor(node: dict[str, Any], name: str) -> dict[str, Any]:
    factors: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in node["explanation"]["factors"]}
    return factors[name]


async def test_failing_tikv_requests_are_reported_in_all_outputs(
    server: ApiServer, metrics_nodes: list[FakeMetricsNode], capsys: pytest.CaptureFixture[str]
) -> None:
    failing, healthy = metrics_nodes
    for node in metrics_nodes:
        await server.wait_for_state(node.address, "active")
    await failing.set_metrics(tikv_failures=0.6)

    async with asyncio.timeout(15):
        while factor(await server.node(failing.address), "health")["share"] in (None, 1):  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.05)

    reported = await server.node(failing.address)
    assert [entry["name"] for entry in reported["explanation"]["factors"]] == FACTOR_ORDER
    health = factor(reported, "health")
    assert (health["score"], health["share"] < 1) == (2, True)
    assert "failures per 100 requests to TiKV, so its share goes down to 2%" in health["reason"]
    assert health["reason"] in reported["explanation"]["sentence"]
    assert reported["explanation"]["weight"] == reported["published_weight"]
    assert reported["metrics"]["tikv_failures"] >= 0.3
    assert (reported["metrics"]["memory"], reported["group"], reported["backup"], reported["zone"]) == (
        0.1,
        "",
        False,
        None,
    )

    plain = (await server.http.get("/v1/nodes")).json()["nodes"]
    assert [entry["explanation"] for entry in plain] == [None, None]
    explained = (await server.http.get("/v1/nodes", params={"explain": "true"})).json()["nodes"]
    assert sum(entry["explanation"]["share"] for entry in explained) == pytest.approx(1, abs=0.001)
    misspelled = await server.http.get("/v1/nodes", params={"explained": "true"})
    assert misspelled.status_code == 422

    capsys.readouterr()
    for command in (["nodes", "--explain"], ["nodes", "--explain", failing.address]):
        assert await asyncio.to_thread(run, [*command, "--url", server.url]) == 0
        table = capsys.readouterr().out.splitlines()
        assert [
            *("ADDRESS", "STATE", "SHARE", "WEIGHT", "ZONE", "SESSIONS", "HEALTH", "MEMORY", "CPU", "WHY")
        ] in [line.split() for line in table]
        (row,) = (line for line in table if line.startswith(f"{failing.address}  "))
        assert "  abnormal (" in row
        assert "so its share goes down to 2%" in row
        assert any(line.startswith(f"{healthy.address}  ") for line in table) is (len(command) == 2)

    series = (await server.http.get("/metrics")).text
    assert f'tidevoy_node_factor_share{{factor="health",node="{failing.address}"}}' in series
    assert f'tidevoy_node_tikv_failure_ratio{{node="{failing.address}"}}' in series
    assert "tidevoy_node_metrics_outage 0.0" in series
    assert "node.factor" in {event["kind"] for event in await stored_events(server.http)}

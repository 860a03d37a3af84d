"""Why a node has its share of the new sessions: over HTTP, and as a table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cli.main import run
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.node_metrics import FakeMetricsNode, run_fake_metrics_node

BALANCE = {"slow_start": 0, "metrics": {"interval": 0.1}}
ORDER = ["state", "labels", "health", "memory", "cpu", "location", "connections"]


@pytest.fixture
async def patients() -> AsyncIterator[list[FakeMetricsNode]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_fake_metrics_node()) for _ in range(2)]


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports, patients: list[FakeMetricsNode]) -> AsyncIterator[ApiServer]:
    nodes = [{"address": each.address, "status_address": each.status} for each in patients]
    health = {"sql": {"interval": 0.1}, "status": {"interval": 0.1}}
    wanted = settings(tmp_path, ports, balance=BALANCE, health=health)
    async with run_api_server(type(wanted).model_validate(wanted.model_dump() | {"nodes": nodes})) as plane:
        yield plane


def factor(node: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in node["explanation"]["factors"] if f["name"] == name)
    return found


async def test_a_node_whose_requests_fail_says_so_everywhere(
    plane: ApiServer, patients: list[FakeMetricsNode], capsys: pytest.CaptureFixture[str]
) -> None:
    ill, well = patients
    for each in patients:
        await plane.wait_for_state(each.address, "active")
    await ill.set_metrics(tikv_failures=0.6)

    async with asyncio.timeout(15):
        while factor(await plane.node(ill.address), "health")["share"] in (None, 1):  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.05)

    shown = await plane.node(ill.address)
    assert [each["name"] for each in shown["explanation"]["factors"]] == ORDER
    health = factor(shown, "health")
    assert (health["score"], health["share"] < 1) == (2, True)
    assert "failures for each 100 requests to TiKV, so its share goes down to 2%" in health["reason"]
    assert health["reason"] in shown["explanation"]["sentence"]
    assert shown["explanation"]["weight"] == shown["published_weight"]
    assert shown["vitals"]["tikv_failures"] >= 0.3
    assert (shown["vitals"]["memory"], shown["group"], shown["backup"], shown["zone"]) == (
        0.1,
        "",
        False,
        None,
    )

    plain = (await plane.http.get("/v1/nodes")).json()["nodes"]
    assert [node["explanation"] for node in plain] == [None, None]
    listed = (await plane.http.get("/v1/nodes", params={"explain": "true"})).json()["nodes"]
    assert sum(node["explanation"]["share"] for node in listed) == pytest.approx(1, abs=0.001)
    refused = await plane.http.get("/v1/nodes", params={"explained": "true"})
    assert refused.status_code == 422

    capsys.readouterr()
    for command in (["nodes", "--explain"], ["nodes", "--explain", ill.address]):
        assert await asyncio.to_thread(run, [*command, "--url", plane.url]) == 0
        table = capsys.readouterr().out.splitlines()
        assert [
            *("ADDRESS", "STATE", "SHARE", "WEIGHT", "ZONE", "SESSIONS", "HEALTH", "MEMORY", "CPU", "WHY")
        ] in [line.split() for line in table]
        (row,) = (line for line in table if line.startswith(f"{ill.address}  "))
        assert "  abnormal (" in row
        assert "so its share goes down to 2%" in row
        assert any(line.startswith(f"{well.address}  ") for line in table) is (len(command) == 2)

    series = (await plane.http.get("/metrics")).text
    assert f'tidevoy_node_factor_share{{factor="health",node="{ill.address}"}}' in series
    assert f'tidevoy_node_tikv_failure_ratio{{node="{ill.address}"}}' in series
    assert "tidevoy_vitals_outage 0.0" in series
    events = (await plane.http.get("/v1/events?follow=false", headers={"Last-Event-ID": "0"})).text
    assert '"kind":"node.factor"' in events

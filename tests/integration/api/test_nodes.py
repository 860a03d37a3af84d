"""`/v1/nodes` over HTTP, with a real control plane behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane import address as addresses
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.telemetry_messages import (
    module_info_family,
    open_metrics_stream,
    sessions_family,
)

PROBLEM = "application/problem+json"


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [node])) as plane:
        yield plane


async def test_a_node_tells_all_that_is_known(plane: ApiServer, node: str) -> None:
    seen = await plane.wait_for_state(node, "active")
    assert set(seen) == {
        *("address", "status_address", "source", "state", "reason", "health", "version", "labels", "weight"),
        *(
            "connections",
            "sessions",
            "since",
            "endpoint",
            "published_weight",
            "advice",
            "started_at",
            "drain",
        ),
        *("sessions_by_state", "pinned", "logins", "login_failures", "connect_failures", "commands"),
        *("latency", "bytes", "errors", "migrations", "departure", "hindrances", "rebalance"),
        *("group", "backup", "zone", "vitals", "explanation", "ejected_by"),
    }
    assert (seen["address"], seen["endpoint"], seen["source"], seen["weight"]) == (node, node, "static", 100)
    assert seen["advice"] == "HEALTHY"
    assert seen["published_weight"] >= 1
    assert (seen["connections"], seen["sessions"], seen["drain"]) == (None, None, None)
    assert (seen["departure"], seen["hindrances"], seen["rebalance"]) == (None, [], 0)
    assert (seen["group"], seen["backup"], seen["zone"], seen["vitals"]) == ("", False, None, None)
    unread = {each["name"]: each["score"] for each in seen["explanation"]["factors"]}
    assert [unread[name] for name in ("state", "health", "memory", "cpu")] == [0, None, None, None]
    assert seen["health"]["status"] is None
    assert seen["health"]["sql"]["outcome"] == "pass"
    assert datetime.fromisoformat(seen["since"]).utcoffset() == timedelta(0)
    listed = (await plane.http.get("/v1/nodes")).json()
    assert set(listed) == {"nodes", "problems", "foreign", "excluded"}
    assert [entry["address"] for entry in listed["nodes"]] == [node]


async def test_add_change_and_remove(plane: ApiServer) -> None:
    added = await plane.http.post(
        "/v1/nodes", json={"address": "[FD00::1]:4000", "weight": 7, "labels": {"zone": "a"}}
    )
    assert added.status_code == 201
    assert added.headers["location"] == "/v1/nodes/%5Bfd00%3A%3A1%5D%3A4000"
    assert (added.json()["address"], added.json()["state"]) == ("[fd00::1]:4000", "joining")
    there = (await plane.http.get(added.headers["location"])).json()
    assert (there["weight"], there["labels"], there["source"]) == (7, {"zone": "a"}, "api")

    again = await plane.http.post("/v1/nodes", json={"address": "[fd00::1]:4000"})
    assert (again.status_code, again.json()["type"]) == (409, "urn:tidevoy:problem:node-exists")

    changed = await plane.http.patch(added.headers["location"], json={"weight": 9})
    assert (changed.status_code, changed.json()["weight"], changed.json()["labels"]) == (
        200,
        9,
        {"zone": "a"},
    )

    removed = await plane.http.delete(added.headers["location"])
    assert removed.status_code == 202


async def test_labels_are_laid_over_those_of_the_source(plane: ApiServer) -> None:
    given = {"zone": "a", "rack": "1"}
    added = await plane.http.post("/v1/nodes", json={"address": "127.0.0.1:1", "labels": given})
    path = added.headers["location"]
    for laid_over, seen in (
        ({"team": "x"}, {**given, "team": "x"}),
        ({"zone": "b"}, {**given, "zone": "b"}),  # the label before is taken back: all are replaced
        (None, {**given, "zone": "b"}),
        ({}, given),
    ):
        changed = await plane.http.patch(path, json={"labels": laid_over})
        assert (changed.status_code, changed.json()["labels"]) == (200, seen)
        assert (await plane.node("127.0.0.1:1"))["labels"] == seen


async def test_drain_and_undrain_are_idempotent(plane: ApiServer, node: str) -> None:
    await plane.wait_for_state(node, "active")
    for _ in range(2):
        answer = await plane.http.post(f"/v1/nodes/{node}/drain", json={"deadline_seconds": 30})
        assert answer.status_code == 202
        assert answer.json()["state"] in ("draining", "drained")
        assert answer.json()["advice"] == "DRAINING"
        drain = answer.json()["drain"]
        assert drain["on_deadline"] == "keep"
        length = datetime.fromisoformat(drain["deadline"]) - datetime.fromisoformat(drain["since"])
        assert length == timedelta(seconds=30)
    for _ in range(2):
        answer = await plane.http.post(f"/v1/nodes/{node}/undrain")
        assert (answer.status_code, answer.json()["drain"]) == (202, None)
    await plane.wait_for_state(node, "active")


async def test_a_drain_needs_no_body(plane: ApiServer, node: str) -> None:
    answer = await plane.http.post(f"/v1/nodes/{node}/drain")
    drain = answer.json()["drain"]
    length = datetime.fromisoformat(drain["deadline"]) - datetime.fromisoformat(drain["since"])
    assert (answer.status_code, length) == (202, timedelta(seconds=600))


async def test_ending_sessions_is_refused_while_an_envoy_has_no_module(plane: ApiServer, node: str) -> None:
    port = addresses.split(plane.next_settings.xds.listen)[1]
    async with FakeEnvoy(port, "one", module=VERSION), FakeEnvoy(port, "stock"):
        async with asyncio.timeout(15):
            while len((await plane.http.get("/v1/envoys")).json()["envoys"]) != 2:
                pass
        closing = await plane.http.post(f"/v1/nodes/{node}/drain", json={"on_deadline": "close"})
        forced = await plane.http.delete(f"/v1/nodes/{node}", params={"force": "true"})
        for answer in (closing, forced):
            assert (answer.status_code, answer.headers["content-type"]) == (409, PROBLEM)
            assert answer.json()["type"] == "urn:tidevoy:problem:needs-module"
            assert "it is not in use in stock;" in answer.json()["detail"]
        assert (await plane.node(node))["drain"] is None


async def test_sessions_are_ended_at_the_deadline_or_at_once(plane: ApiServer, node: str) -> None:
    port = addresses.split(plane.next_settings.xds.listen)[1]
    await plane.wait_for_state(node, "active")
    async with FakeEnvoy(port, module=VERSION), open_metrics_stream(port) as stream:
        for _ in range(2):
            await stream.send(sessions_family(2, node), module_info_family(), envoy="envoy-1")
        async with asyncio.timeout(15):
            while (await plane.node(node))["sessions"] != 2:
                pass
        body = {"deadline_seconds": 0.5, "on_deadline": "close"}
        asked = await plane.http.post(f"/v1/nodes/{node}/drain", json=body)
        assert (asked.status_code, asked.json()["drain"]["on_deadline"]) == (202, "close")
        assert asked.json()["reason"] == "drained by an operator"
        async with asyncio.timeout(15):
            while "the sessions that are left are ended" not in (await plane.node(node))["reason"]:
                pass
        assert (await plane.http.post(f"/v1/nodes/{node}/undrain")).json()["state"] == "active"
        forced = await plane.http.delete(f"/v1/nodes/{node}", params={"force": "true"})
        assert forced.status_code == 202
        assert forced.json()["reason"].startswith("removed by an operator; the deadline has passed, and the")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "address"),
        ({"address": "127.0.0.1"}, "address"),
        ({"address": "a:0"}, "address"),
        ({"address": "::1:4000"}, "address"),
        ({"address": 4000}, "address"),
        ({"address": "a:1", "status_address": "b"}, "status_address"),
        ({"address": "a:1", "weight": 0}, "weight"),
        ({"address": "a:1", "weight": 10_001}, "weight"),
        ({"address": "a:1", "weight": "5"}, "weight"),
        ({"address": "a:1", "weight": True}, "weight"),
        ({"address": "a:1", "wieght": 5}, "wieght"),
        ({"address": "a:1", "labels": {"x": "v" * 257}}, "labels.x"),
        ({"address": "a:1", "labels": {"": "v"}}, "labels."),
        ({"address": "a:1", "labels": {"x": 1}}, "labels.x"),
        ({"address": "a:1", "labels": {str(n): "" for n in range(65)}}, "labels"),
        ([], "body"),
    ],
)
async def test_a_bad_value_is_named(plane: ApiServer, body: Any, field: str) -> None:
    answer = await plane.http.post("/v1/nodes", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert [wrong["field"] for wrong in answer.json()["errors"]] == [field]


@pytest.mark.parametrize(
    "body",
    [
        '{"deadline_seconds": NaN}',
        '{"deadline_seconds": Infinity}',
        '{"deadline_seconds": 1e999}',
        '{"deadline_seconds": -1}',
        '{"deadline_seconds": 604801}',
        '{"deadline_seconds": "600"}',
        '{"on_deadline": "kill"}',
        '{"on_deadlin": "keep"}',
        '{"on_deadline": "\\ud800"}',
        '{"deadline_seconds": 1',
    ],
)
async def test_a_bad_drain(plane: ApiServer, node: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await plane.http.post(f"/v1/nodes/{node}/drain", content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert (await plane.node(node))["drain"] is None


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/nodes/127.0.0.1:1", 404, "unknown-node"),
        ("POST", "/v1/nodes/127.0.0.1:1/drain", 404, "unknown-node"),
        ("POST", "/v1/nodes/127.0.0.1:1/undrain", 404, "unknown-node"),
        ("DELETE", "/v1/nodes/127.0.0.1:1", 404, "unknown-node"),
        ("GET", "/v1/nodes/%5B::1%5D:4000", 404, "unknown-node"),
        ("GET", "/v1/nodes/nowhere", 422, "invalid-request"),
        ("GET", "/v1/nodes/a%2Fb:1", 404, "not-found"),
        ("DELETE", "/v1/nodes/127.0.0.1:1?forse=true", 422, "invalid-request"),
        ("DELETE", "/v1/nodes/127.0.0.1:1?force=perhaps", 422, "invalid-request"),
        ("GET", "/v1/nodes/", 404, "not-found"),
        ("GET", "/v2/nodes", 404, "not-found"),
    ],
)
async def test_a_path_that_leads_nowhere(
    plane: ApiServer, method: str, path: str, status: int, kind: str
) -> None:
    answer = await plane.http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    assert answer.json()["type"] == f"urn:tidevoy:problem:{kind}"
    assert answer.json()["status"] == status

"""`/v1/nodes` over HTTP against a running control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, settings
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.telemetry_messages import (
    module_info_family,
    open_metrics_stream,
    sessions_family,
)


@pytest.fixture
async def server(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [node])) as server:
        yield server


async def test_node_has_all_fields(server: ApiServer, node: str) -> None:
    reported = await server.wait_for_state(node, "active")
    assert set(reported) == {
        *("address", "status_address", "source", "state", "reason", "health", "version", "labels", "weight"),
        *(
            "connections",
            "sessions",
            "since",
            "endpoint",
            "published_weight",
            "eds_health",
            "started_at",
            "drain",
        ),
        *("sessions_by_state", "not_movable", "logins", "login_failures", "connect_failures", "commands"),
        *("latency", "bytes", "errors", "migrations", "drain_progress", "migration_blockers", "rebalance"),
        *("group", "backup", "zone", "metrics", "explanation", "ejected_by"),
    }
    assert (reported["address"], reported["endpoint"], reported["source"], reported["weight"]) == (
        node,
        node,
        "static",
        100,
    )
    assert reported["eds_health"] == "HEALTHY"
    assert reported["published_weight"] >= 1
    assert (reported["connections"], reported["sessions"], reported["drain"]) == (None, None, None)
    assert (reported["drain_progress"], reported["migration_blockers"]) == (None, [])
    assert reported["rebalance"] == 0
    assert (reported["group"], reported["backup"], reported["zone"], reported["metrics"]) == (
        "",
        False,
        None,
        None,
    )
    scores = {factor["name"]: factor["score"] for factor in reported["explanation"]["factors"]}
    assert [scores[name] for name in ("state", "health", "memory", "cpu")] == [0, None, None, None]
    assert reported["health"]["status"] is None
    assert reported["health"]["sql"]["status"] == "pass"
    assert datetime.fromisoformat(reported["since"]).utcoffset() == timedelta(0)
    listed = (await server.http.get("/v1/nodes")).json()
    assert set(listed) == {"nodes", "problems", "other_keyspace", "excluded"}
    assert [entry["address"] for entry in listed["nodes"]] == [node]


async def test_add_change_and_remove(server: ApiServer) -> None:
    added = await server.http.post(
        "/v1/nodes", json={"address": "[FD00::1]:4000", "weight": 7, "labels": {"zone": "a"}}
    )
    assert added.status_code == 201
    assert added.headers["location"] == "/v1/nodes/%5Bfd00%3A%3A1%5D%3A4000"
    assert (added.json()["address"], added.json()["state"]) == ("[fd00::1]:4000", "joining")
    node = (await server.http.get(added.headers["location"])).json()
    assert (node["weight"], node["labels"], node["source"]) == (7, {"zone": "a"}, "api")

    repeated = await server.http.post("/v1/nodes", json={"address": "[fd00::1]:4000"})
    assert (repeated.status_code, problem_kind(repeated)) == (409, "node-exists")

    changed = await server.http.patch(added.headers["location"], json={"weight": 9})
    assert (changed.status_code, changed.json()["weight"], changed.json()["labels"]) == (
        200,
        9,
        {"zone": "a"},
    )

    removed = await server.http.delete(added.headers["location"])
    assert removed.status_code == 202


async def test_patched_labels_override_those_of_the_source(server: ApiServer) -> None:
    source_labels = {"zone": "a", "rack": "1"}
    added = await server.http.post("/v1/nodes", json={"address": "127.0.0.1:1", "labels": source_labels})
    path = added.headers["location"]
    for overrides, expected in (
        ({"team": "x"}, {**source_labels, "team": "x"}),
        ({"zone": "b"}, {**source_labels, "zone": "b"}),  # replaces all earlier overrides
        (None, {**source_labels, "zone": "b"}),
        ({}, source_labels),
    ):
        changed = await server.http.patch(path, json={"labels": overrides})
        assert (changed.status_code, changed.json()["labels"]) == (200, expected)
        assert (await server.node("127.0.0.1:1"))["labels"] == expected


async def test_drain_and_undrain_are_idempotent(server: ApiServer, node: str) -> None:
    await server.wait_for_state(node, "active")
    for _ in range(2):
        response = await server.http.post(f"/v1/nodes/{node}/drain", json={"deadline_seconds": 30})
        assert response.status_code == 202
        assert response.json()["state"] in ("draining", "drained")
        assert response.json()["eds_health"] == "DRAINING"
        drain = response.json()["drain"]
        assert drain["on_deadline"] == "keep"
        duration = datetime.fromisoformat(drain["deadline"]) - datetime.fromisoformat(drain["since"])
        assert duration == timedelta(seconds=30)
    for _ in range(2):
        response = await server.http.post(f"/v1/nodes/{node}/undrain")
        assert (response.status_code, response.json()["drain"]) == (202, None)
    await server.wait_for_state(node, "active")


async def test_drain_without_body_uses_the_defaults(server: ApiServer, node: str) -> None:
    response = await server.http.post(f"/v1/nodes/{node}/drain")
    drain = response.json()["drain"]
    duration = datetime.fromisoformat(drain["deadline"]) - datetime.fromisoformat(drain["since"])
    assert (response.status_code, duration) == (202, timedelta(seconds=600))


async def test_closing_sessions_is_rejected_while_an_envoy_has_no_module(
    server: ApiServer, node: str
) -> None:
    port = server.xds_port
    async with FakeEnvoy(port, "one", module=VERSION), FakeEnvoy(port, "stock"):
        async with asyncio.timeout(15):
            while len((await server.http.get("/v1/envoys")).json()["envoys"]) != 2:
                pass
        closing = await server.http.post(f"/v1/nodes/{node}/drain", json={"on_deadline": "close"})
        forced = await server.http.delete(f"/v1/nodes/{node}", params={"force": "true"})
        for response in (closing, forced):
            assert (response.status_code, problem_kind(response)) == (409, "needs-module")
            assert "these Envoys do not use it: stock;" in response.json()["detail"]
        assert (await server.node(node))["drain"] is None


async def test_sessions_are_closed_at_the_deadline_or_at_once(server: ApiServer, node: str) -> None:
    port = server.xds_port
    await server.wait_for_state(node, "active")
    async with FakeEnvoy(port, module=VERSION), open_metrics_stream(port) as stream:
        for _ in range(2):
            await stream.send(sessions_family(2, node), module_info_family(), envoy="envoy-1")
        async with asyncio.timeout(15):
            while (await server.node(node))["sessions"] != 2:
                pass
        body = {"deadline_seconds": 0.5, "on_deadline": "close"}
        drained = await server.http.post(f"/v1/nodes/{node}/drain", json=body)
        assert (drained.status_code, drained.json()["drain"]["on_deadline"]) == (202, "close")
        assert drained.json()["reason"] == "drained by an operator"
        async with asyncio.timeout(15):
            while "the remaining sessions are terminated" not in (await server.node(node))["reason"]:
                pass
        assert (await server.http.post(f"/v1/nodes/{node}/undrain")).json()["state"] == "active"
        forced = await server.http.delete(f"/v1/nodes/{node}", params={"force": "true"})
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
async def test_error_names_the_invalid_field(server: ApiServer, body: Any, field: str) -> None:
    response = await server.http.post("/v1/nodes", json=body)
    assert (response.status_code, problem_kind(response)) == (422, "invalid-request")
    assert [error["field"] for error in response.json()["errors"]] == [field]


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
async def test_invalid_drain_parameters_are_rejected(server: ApiServer, node: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    response = await server.http.post(f"/v1/nodes/{node}/drain", content=body, headers=headers)
    assert (response.status_code, problem_kind(response)) == (422, "invalid-request")
    assert (await server.node(node))["drain"] is None


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
async def test_unknown_nodes_and_invalid_paths_are_rejected(
    server: ApiServer, method: str, path: str, status: int, kind: str
) -> None:
    response = await server.http.request(method, path)
    assert (response.status_code, problem_kind(response)) == (status, kind)

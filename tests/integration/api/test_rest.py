"""What all REST calls have in common, and the calls beside nodes and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from api.app import create_app
from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import ConfigError, ConfigErrors
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts

PROBLEM = "application/problem+json"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports)) as plane:
        yield plane


def kind(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["title"]
    assert problem["detail"]
    return str(problem["type"]).removeprefix("urn:tidevoy:problem:")


async def test_what_is_no_http_gets_plain_text(plane: ApiServer) -> None:
    host, port = addresses.split(plane.url.removeprefix("http://"))
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"nonsense\r\n\r\n")
        async with asyncio.timeout(10):
            head, _, _ = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: text/plain" in head


async def test_what_answers(plane: ApiServer) -> None:
    about = (await plane.http.get("/")).json()
    assert about["name"] == "tidevoy"
    for path in (about["openapi"], about["nodes"], about["envoys"]):
        assert (await plane.http.get(path)).status_code == 200


async def test_alive_but_not_ready_without_nodes(plane: ApiServer) -> None:
    assert (await plane.http.get("/healthz")).json() == {"status": "ok"}
    answer = await plane.http.get("/readyz")
    assert (answer.status_code, kind(answer)) == (503, "not-ready")
    assert answer.json()["reasons"] == ["no node is active"]


async def test_ready_with_a_node_in_service(tmp_path: Path, ports: Ports) -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer,
        run_api_server(settings(tmp_path, ports, [peer.endpoint])) as plane,
    ):
        await plane.wait_for_state(peer.endpoint, "active")
        assert (await plane.http.get("/readyz")).json() == {"ready": True}


async def test_metrics_are_those_of_the_engine(plane: ApiServer) -> None:
    answer = await plane.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'tidevoy_nodes{state="active"} 0.0' in answer.text


async def test_no_envoy_yet(plane: ApiServer) -> None:
    assert (await plane.http.get("/v1/envoys")).json() == {"envoys": []}


async def test_the_settings_in_force(plane: ApiServer) -> None:
    shown = (await plane.http.get("/v1/config")).json()
    assert shown["api"]["listen"] == plane.next_settings.api.listen
    assert Settings.model_validate(shown) == plane.next_settings


async def test_a_reload_tells_what_changed(plane: ApiServer, tmp_path: Path) -> None:
    changed = plane.next_settings.model_dump() | {
        "balance": {"slow_start": 7.0},
        "sql": {"max_connections": 5},
        "state_dir": tmp_path,
    }
    plane.next_settings = Settings.model_validate(changed)
    answer = await plane.http.post("/v1/config/reload")
    assert answer.status_code == 200
    assert answer.json() == {
        "now": ["balance.slow_start"],
        "new_envoys": ["sql.max_connections"],
        "restart": ["state_dir"],
    }
    shown = (await plane.http.get("/v1/config")).json()
    assert shown["balance"]["slow_start"] == 7.0
    assert shown["state_dir"] != str(tmp_path)


async def test_a_bad_reload_keeps_the_old(plane: ApiServer) -> None:
    before = (await plane.http.get("/v1/config")).json()
    one = ConfigError("t.yaml:1", "pd.urls", "'x' is no URL", "write http://host:2379")
    two = ConfigError("t.yaml:2", "sql", "x", "y")
    plane.failures = [ConfigErrors([one, two]), one]
    for fields in (["pd.urls"], ["pd.urls", "sql"]):
        answer = await plane.http.post("/v1/config/reload")
        assert (answer.status_code, kind(answer)) == (422, "bad-configuration")
        assert [wrong["field"] for wrong in answer.json()["errors"]] == fields
        assert "t.yaml:1" in answer.json()["detail"]
    assert (await plane.http.get("/v1/config")).json() == before


async def test_intents_that_cannot_be_kept_are_refused(plane: ApiServer) -> None:
    for file in plane.next_settings.state_dir.iterdir():
        file.unlink()
    plane.next_settings.state_dir.rmdir()
    answer = await plane.http.post("/v1/nodes", json={"address": "127.0.0.1:1"})
    assert (answer.status_code, kind(answer), answer.headers["retry-after"]) == (503, "unavailable", "1")
    assert (await plane.http.get("/v1/nodes")).json()["nodes"] == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/nodes", "GET, POST"),
        ("OPTIONS", "/v1/nodes/a:1", "DELETE, GET, PATCH"),
        ("DELETE", "/v1/config", "GET"),
        ("GET", "/v1/nodes/a:1/drain", "POST"),
        ("TRACE", "/healthz", "GET"),
    ],
)
async def test_a_method_that_a_path_does_not_know(
    plane: ApiServer, method: str, path: str, allowed: str
) -> None:
    answer = await plane.http.request(method, path)
    assert (answer.status_code, kind(answer)) == (405, "method-not-allowed")
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/nodes/a:1/drain"])
async def test_a_body_that_is_not_json(plane: ApiServer, path: str, media_type: str) -> None:
    headers = {"content-type": media_type} if media_type else {}
    answer = await plane.http.post(path, content=b'{"address": "a:1"}', headers=headers)
    assert (answer.status_code, kind(answer)) == (415, "unsupported-media-type")


async def test_a_body_that_is_too_large(plane: ApiServer) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    announced = await plane.http.post("/v1/nodes", content=b" " * 600_000, headers=JSON)
    chunked = await plane.http.post("/v1/nodes", content=pieces(), headers=JSON)
    for answer in (announced, chunked):
        assert (answer.status_code, kind(answer)) == (413, "too-large")
    assert (await plane.http.get("/healthz")).status_code == 200


async def test_the_largest_labels_fit(plane: ApiServer) -> None:
    labels = {f"{n:03}" + "\N{ELECTRIC PLUG}" * 253: "\N{ELECTRIC PLUG}" * 256 for n in range(64)}
    answer = await plane.http.post("/v1/nodes", json={"address": "127.0.0.1:1", "labels": labels})
    assert (answer.status_code, answer.json()["labels"]) == (201, labels)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://["])
async def test_pages_of_other_origins_may_only_read(plane: ApiServer, origin: str) -> None:
    answer = await plane.http.post("/v1/config/reload", headers={"origin": origin})
    assert (answer.status_code, kind(answer)) == (403, "foreign-origin")
    assert (await plane.http.get("/v1/nodes", headers={"origin": origin})).status_code == 200


async def test_our_own_pages_may_change_things(plane: ApiServer) -> None:
    answer = await plane.http.post("/v1/config/reload", headers={"origin": plane.url})
    assert answer.status_code == 200


async def test_a_bug_tells_nothing_of_our_insides() -> None:
    # No engine but what the doors need of one.
    bare = SimpleNamespace(settings=Settings(), registry=CollectorRegistry(), record_event=None)
    app = create_app(cast(Engine, bare))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/v1/nodes")
    assert (answer.status_code, kind(answer)) == (500, "internal")
    assert "SimpleNamespace" not in answer.text

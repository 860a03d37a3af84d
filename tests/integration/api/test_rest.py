"""Behaviour common to all REST calls, and the calls for health, config, and the overview."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from api.app import create_app
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import ConfigError, ConfigErrors, StateUnavailable
from controlplane.storage.file_store import FileStore
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, settings
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts

JSON_HEADERS = {"content-type": "application/json"}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports)) as server:
        yield server


async def test_overview_lists_the_main_paths(server: ApiServer) -> None:
    about = (await server.http.get("/")).json()
    assert about["name"] == "tidevoy"
    for path in (about["openapi"], about["nodes"], about["envoys"]):
        assert (await server.http.get(path)).status_code == 200


async def test_not_ready_without_active_nodes(server: ApiServer) -> None:
    assert (await server.http.get("/healthz")).json() == {"status": "ok"}
    response = await server.http.get("/readyz")
    assert (response.status_code, problem_kind(response)) == (503, "not-ready")
    assert response.json()["reasons"] == ["no node is active"]


async def test_ready_with_an_active_node(tmp_path: Path, ports: Ports) -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as peer,
        run_api_server(settings(tmp_path, ports, [peer.endpoint])) as server,
    ):
        await server.wait_for_state(peer.endpoint, "active")
        assert (await server.http.get("/readyz")).json() == {"ready": True}


async def test_metrics_come_from_the_engine(server: ApiServer) -> None:
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'tidevoy_nodes{state="active"} 0.0' in response.text


async def test_envoy_list_is_empty_before_the_first_connects(server: ApiServer) -> None:
    assert (await server.http.get("/v1/envoys")).json() == {"envoys": []}


async def test_config_shows_the_current_settings(server: ApiServer) -> None:
    config = (await server.http.get("/v1/config")).json()
    assert config["api"]["listen"] == server.next_settings.api.listen
    assert Settings.model_validate(config) == server.next_settings


async def test_reload_reports_the_changed_settings(server: ApiServer, tmp_path: Path) -> None:
    changed = server.next_settings.model_dump() | {
        "balance": {"slow_start": 7.0},
        "sql": {"max_connections": 5},
        "state_dir": tmp_path,
    }
    server.next_settings = Settings.model_validate(changed)
    response = await server.http.post("/v1/config/reload")
    assert response.status_code == 200
    assert response.json() == {
        "applied": ["balance.slow_start"],
        "applied_by_module": ["sql.max_connections"],
        "needs_new_envoys": [],
        "needs_restart": ["state_dir"],
    }
    config = (await server.http.get("/v1/config")).json()
    assert config["balance"]["slow_start"] == 7.0
    assert config["state_dir"] != str(tmp_path)


async def test_failed_reload_keeps_the_old_settings(server: ApiServer) -> None:
    before = (await server.http.get("/v1/config")).json()
    url_error = ConfigError("t.yaml:1", "pd.urls", "'x' is no URL", "write http://host:2379")
    sql_error = ConfigError("t.yaml:2", "sql", "x", "y")
    server.failures = [url_error, ConfigErrors([url_error, sql_error])]
    for fields in (["pd.urls"], ["pd.urls", "sql"]):
        response = await server.http.post("/v1/config/reload")
        assert (response.status_code, problem_kind(response)) == (422, "bad-configuration")
        assert [error["field"] for error in response.json()["errors"]] == fields
        assert "t.yaml:1" in response.json()["detail"]
    assert (await server.http.get("/v1/config")).json() == before


async def test_intent_that_cannot_be_saved_is_rejected(server: ApiServer) -> None:
    # One rename, because the engine may write a file at any time.
    directory = server.next_settings.state_dir
    directory.rename(directory.with_name("moved-away"))
    response = await server.http.post("/v1/nodes", json={"address": "127.0.0.1:1"})
    assert (response.status_code, problem_kind(response), response.headers["retry-after"]) == (
        503,
        "unavailable",
        "1",
    )
    assert (await server.http.get("/v1/nodes")).json()["nodes"] == []


async def test_denied_access_to_pd_does_not_ask_for_a_retry(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(*_: object) -> int:
        raise StateUnavailable("/tidevoy/intents in PD", "permission denied", retryable=False)

    monkeypatch.setattr(FileStore, "save_intents", denied)
    response = await server.http.post("/v1/nodes", json={"address": "127.0.0.1:1"})
    assert (response.status_code, problem_kind(response)) == (503, "unavailable")
    assert "retry-after" not in response.headers


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
async def test_unsupported_method_is_rejected(
    server: ApiServer, method: str, path: str, allowed: str
) -> None:
    response = await server.http.request(method, path)
    assert (response.status_code, problem_kind(response)) == (405, "method-not-allowed")
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/nodes/a:1/drain"])
async def test_body_of_another_media_type_is_rejected(server: ApiServer, path: str, media_type: str) -> None:
    headers = {"content-type": media_type} if media_type else {}
    response = await server.http.post(path, content=b'{"address": "a:1"}', headers=headers)
    assert (response.status_code, problem_kind(response)) == (415, "unsupported-media-type")


async def test_oversized_chunked_body_is_rejected(server: ApiServer) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    response = await server.http.post("/v1/nodes", content=chunks(), headers=JSON_HEADERS)
    assert (response.status_code, problem_kind(response)) == (413, "too-large")
    assert (await server.http.get("/healthz")).status_code == 200


async def test_largest_labels_are_accepted(server: ApiServer) -> None:
    labels = {f"{n:03}" + "\N{ELECTRIC PLUG}" * 253: "\N{ELECTRIC PLUG}" * 256 for n in range(64)}
    response = await server.http.post("/v1/nodes", json={"address": "127.0.0.1:1", "labels": labels})
    assert (response.status_code, response.json()["labels"]) == (201, labels)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://["])
async def test_cross_origin_pages_may_only_read(server: ApiServer, origin: str) -> None:
    response = await server.http.post("/v1/config/reload", headers={"origin": origin})
    assert (response.status_code, problem_kind(response)) == (403, "foreign-origin")
    assert (await server.http.get("/v1/nodes", headers={"origin": origin})).status_code == 200


async def test_same_origin_pages_may_write(server: ApiServer) -> None:
    response = await server.http.post("/v1/config/reload", headers={"origin": server.url})
    assert response.status_code == 200


async def test_internal_error_does_not_reveal_internals() -> None:
    # An engine that has only the attributes that access control needs.
    incomplete_engine = SimpleNamespace(
        settings=Settings(), registry=CollectorRegistry(), events=SimpleNamespace(emit=None)
    )
    app = create_app(cast(Engine, incomplete_engine))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.get("/v1/nodes")
    assert (response.status_code, problem_kind(response)) == (500, "internal")
    assert "SimpleNamespace" not in response.text

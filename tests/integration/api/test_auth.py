"""Authentication and authorization of the REST API: tokens, roles, the console's login, and audit events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from controlplane.config.api import ApiTokenSettings
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, stored_events
from tests.support.controlplane.authenticated_api import (
    OPERATOR_TOKEN,
    TOKENS,
    UNKNOWN_TOKEN,
    VIEWER_TOKEN,
    HttpConnection,
    bearer_header,
    settings_with_tokens,
)

NODE = "/v1/nodes/127.0.0.1:4000"
NO_LIMIT = {"limits": {"unauthenticated_requests_per_second": 1000}}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings_with_tokens(tmp_path, ports, **NO_LIMIT)) as server:
        yield server


async def audit_events(server: ApiServer) -> list[dict[str, object]]:
    """Return all audit events, oldest first."""
    events = await stored_events(server.http, **bearer_header(OPERATOR_TOKEN))
    return [event for event in events if event["kind"].startswith("audit.")]


def with_tokens(settings: Settings, *tokens: dict[str, str]) -> Settings:
    api_tokens = tuple(ApiTokenSettings.model_validate(token) for token in tokens)
    return settings.model_copy(update={"api": settings.api.model_copy(update={"tokens": api_tokens})})


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/config", "/openapi.json", "/metrics", "/", "/nowhere"])
async def test_unauthenticated_request_is_denied(server: ApiServer, path: str) -> None:
    for headers in ({}, bearer_header(UNKNOWN_TOKEN)):
        response = await server.http.get(path, headers=headers)
        assert (response.status_code, problem_kind(response)) == (401, "unauthenticated"), headers
        assert response.headers["www-authenticate"] == 'Bearer realm="tidevoy"'
        assert response.headers["connection"] == "close"


async def test_two_authorization_headers_are_denied(server: ApiServer) -> None:
    both = httpx2.Headers(
        [("authorization", f"Bearer {OPERATOR_TOKEN}"), ("authorization", f"Bearer {OPERATOR_TOKEN}")]
    )
    assert (await server.http.get("/v1/nodes", headers=both)).status_code == 401


async def test_health_checks_need_no_token(server: ApiServer) -> None:
    assert (await server.http.get("/healthz")).status_code == 200
    assert (await server.http.get("/readyz")).status_code in (200, 503)


async def test_viewer_reads_and_its_writes_are_denied_and_audited(server: ApiServer) -> None:
    viewer = bearer_header(VIEWER_TOKEN)
    for path in ("/v1/nodes", NODE, "/v1/envoys", "/v1/config", "/metrics", "/openapi.json"):
        assert (await server.http.get(path, headers=viewer)).status_code == 200
    for method, path in (
        ("POST", f"{NODE}/drain"),
        ("POST", f"{NODE}/undrain"),
        ("POST", "/v1/nodes"),
        ("PATCH", NODE),
        ("DELETE", NODE),
        ("POST", "/v1/config/reload"),
        ("DELETE", "/v1/envoys/envoy-1"),
        ("POST", "/v1/rollouts"),
        ("POST", f"/console/nodes/{NODE.rpartition('/')[2]}/weight"),
        ("POST", "/console/rollouts/x/abort"),
        ("PUT", "/v1/nodes"),
    ):
        response = await server.http.request(method, path, headers=viewer)
        assert (response.status_code, problem_kind(response)) == (403, "forbidden")
    node = (await server.http.get(NODE, headers=viewer)).json()
    assert node["drain"] is None
    denied = [event["kind"] for event in await audit_events(server)]
    assert denied == [
        "audit.drain_node",
        "audit.undrain_node",
        "audit.add_node",
        "audit.change_node",
        "audit.remove_node",
        "audit.reload_config",
        "audit.forget_envoy",
        "audit.start_rollout",
        "audit.weigh_node",
        "audit.abort_rollout",
    ]


async def test_audit_events_record_caller_and_outcome_of_writes(server: ApiServer) -> None:
    operator = bearer_header(OPERATOR_TOKEN)
    assert (await server.http.post(f"{NODE}/drain", headers=operator)).status_code == 202
    assert (await server.http.post("/v1/nodes/127.0.0.1:1/drain", headers=operator)).status_code == 404
    assert (await server.http.post(f"{NODE}/drain", headers=bearer_header(VIEWER_TOKEN))).status_code == 403
    recorded = [(event["subject"], event["data"]) for event in await audit_events(server)]
    anna = {"principal": "anna", "role": "operator", "client_address": "127.0.0.1"}
    vera = {"principal": "vera", "role": "viewer", "client_address": "127.0.0.1"}
    assert recorded == [
        ("127.0.0.1:4000", {**anna, "outcome": "done", "status": 202}),
        ("127.0.0.1:1", {**anna, "outcome": "failed", "status": 404}),
        ("127.0.0.1:4000", {**vera, "outcome": "refused", "status": 403}),
    ]


async def test_audit_events_of_one_caller_are_rate_limited(server: ApiServer) -> None:
    assert (await server.http.post(f"{NODE}/drain", headers=bearer_header(OPERATOR_TOKEN))).status_code == 202
    for _ in range(50):
        await server.http.post(f"{NODE}/undrain", headers=bearer_header(VIEWER_TOKEN))
        await server.http.post("/login", data={"token": VIEWER_TOKEN})
    server.http.cookies.clear()
    for _ in range(10):  # unauthenticated
        for path in ("/logout", "/login"):
            await server.http.post(path, headers={"cookie": "tidevoy_token=x", "origin": "https://evil"})
            await server.http.post(path, headers={"cookie": "tidevoy_token=x", "origin": server.url})
    kinds = [event["kind"] for event in await audit_events(server)]
    assert kinds[0] == "audit.drain_node"
    limited_kinds = [name for name in kinds if name in ("audit.undrain_node", "audit.login")]
    assert 10 <= len(limited_kinds) <= 15
    assert set(kinds) <= {"audit.drain_node", "audit.undrain_node", "audit.login", "audit.unauthenticated"}


async def test_wrong_tokens_are_counted_and_their_events_rate_limited(server: ApiServer) -> None:
    for _ in range(40):
        await server.http.get("/v1/nodes", headers=bearer_header(UNKNOWN_TOKEN))
    metrics = (await server.http.get("/metrics", headers=bearer_header(VIEWER_TOKEN))).text
    assert 'tidevoy_api_denied_total{reason="wrong_token"} 40.0' in metrics
    events = [event for event in await audit_events(server) if event["kind"] == "audit.unauthenticated"]
    assert 1 <= len(events) <= 8
    assert UNKNOWN_TOKEN not in str(events)


async def test_reload_adds_and_revokes_tokens(server: ApiServer) -> None:
    before = server.next_settings
    server.next_settings = with_tokens(before, TOKENS[0])
    assert (await server.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200
    changed = (await server.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))).json()
    assert changed["applied"] == ["api.tokens"]
    assert (await server.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 401
    server.next_settings = with_tokens(before, TOKENS[0], {**TOKENS[1], "name": "next"})
    await server.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))
    assert (await server.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200


async def test_open_stream_ends_when_its_token_is_revoked(server: ApiServer) -> None:
    server.next_settings = with_tokens(server.next_settings, TOKENS[0])
    async with await HttpConnection.open(server) as operator, await HttpConnection.open(server) as viewer:
        for connection, token in ((operator, OPERATOR_TOKEN), (viewer, VIEWER_TOKEN)):
            connection.send("GET", "/v1/events", f"Authorization: Bearer {token}")
            await connection.reader.readuntil(b": tidevoy\n\n")
        await server.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))
        # The next event reaches the operator, and the viewer's stream ends.
        assert (
            await server.http.post(f"{NODE}/drain", headers=bearer_header(OPERATOR_TOKEN))
        ).status_code == 202
        async with asyncio.timeout(10):
            assert b"drain" not in await viewer.reader.readuntil(b"0\r\n\r\n")
            await operator.reader.readuntil(b"intent.drain")


async def test_every_response_has_security_headers(server: ApiServer) -> None:
    async with await HttpConnection.open(server) as connection:
        responses = [
            await connection.request("GET", "/healthz"),
            await connection.request("GET", "/v1/nodes"),
        ]
    async with await HttpConnection.open(server) as connection:
        responses.append(await connection.request("GET", "/v1/nodes"))
    async with await HttpConnection.open(server) as connection:
        responses.append(
            await connection.request("GET", "/v1/nodes", f"Authorization: Bearer {OPERATOR_TOKEN}")
        )
        responses.append(
            await connection.request("POST", "/nowhere", f"Authorization: Bearer {OPERATOR_TOKEN}")
        )
    assert [status for status, _, _ in responses] == [200, 401, 401, 200, 404]
    for _, headers, _ in responses:
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "strict-transport-security" not in headers


async def test_denied_request_closes_its_connection(server: ApiServer) -> None:
    async with await HttpConnection.open(server) as connection:
        assert (await connection.request("GET", "/healthz"))[0] == 200
        status, headers, _ = await connection.request(
            "GET", "/v1/nodes", f"Authorization: Bearer {UNKNOWN_TOKEN}"
        )
        assert (status, headers["connection"]) == (401, "close")
        assert await connection.read_to_end() == b""


async def test_client_that_still_sends_receives_the_denial(server: ApiServer) -> None:
    async with await HttpConnection.open(server) as connection:
        status, _, body = await connection.request("POST", "/v1/nodes", "Content-Length: 400000")
        assert status == 401
        assert b"unauthenticated" in body
        connection.writer.write(b"x" * 400_000)
        assert await connection.read_to_end() == b""


# --- browsers ---


async def test_browser_is_redirected_to_the_login(server: ApiServer) -> None:
    page = {"accept": "text/html,*/*"}
    response = await server.http.get("/", headers=page)
    assert (response.status_code, response.headers["location"]) == (303, "/login")
    response = await server.http.get("/nodes/a b", headers=page)
    assert (response.status_code, response.headers["location"]) == (303, "/login?next=/nodes/a%20b")
    response = await server.http.get("/v1/nodes", headers={**page, "hx-request": "true"})
    assert (response.status_code, response.headers["hx-redirect"]) == (401, "/login")


async def test_login_sets_cookie_that_authenticates(server: ApiServer) -> None:
    response = await server.http.post("/login", data={"token": OPERATOR_TOKEN, "next": "/nodes"})
    assert (response.status_code, response.headers["location"]) == (303, "/nodes")
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"tidevoy_token={OPERATOR_TOKEN}; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    server.http.cookies.clear()
    cookie_header = {"cookie": f"tidevoy_token={OPERATOR_TOKEN}"}
    assert (await server.http.get("/v1/nodes", headers=cookie_header)).status_code == 200
    same_origin, cross_origin = {"origin": server.url}, {"origin": "https://evil.example"}
    for origin, status in ((cross_origin, 403), ({"origin": "null"}, 403), ({}, 403), (same_origin, 202)):
        drained = await server.http.post(f"{NODE}/drain", headers={**cookie_header, **origin})
        assert drained.status_code == status, origin
    logout = await server.http.post("/logout", headers={**cookie_header, **same_origin})
    assert (logout.status_code, logout.headers["location"]) == (303, "/login?signed_out=1")
    assert "Max-Age=0" in logout.headers["set-cookie"]
    assert {"audit.login", "audit.logout"} <= {str(event["kind"]) for event in await audit_events(server)}


@pytest.mark.parametrize(
    "token",
    [UNKNOWN_TOKEN, "", OPERATOR_TOKEN[:-1], "\u00e4"],
    ids=["unknown", "empty", "cut off", "not ASCII"],
)
async def test_login_with_wrong_token_returns_to_the_login_page(server: ApiServer, token: str) -> None:
    response = await server.http.post("/login", data={"token": token, "next": "/nodes"})
    assert (response.status_code, response.headers["location"]) == (303, "/login?denied=1&next=/nodes")
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "next_path", ["//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nb", "x"]
)
async def test_login_does_not_redirect_to_another_host(server: ApiServer, next_path: str) -> None:
    response = await server.http.post("/login", data={"token": VIEWER_TOKEN, "next": next_path})
    assert response.headers["location"] == "/"


async def test_cross_origin_login_is_denied(server: ApiServer) -> None:
    cross_origin = {"origin": "https://evil.example"}
    response = await server.http.post("/login", data={"token": VIEWER_TOKEN}, headers=cross_origin)
    assert (response.status_code, problem_kind(response)) == (403, "foreign-origin")


# --- without tokens ---


async def test_without_tokens_every_caller_is_operator(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(settings_with_tokens(tmp_path, ports, tokens=[])) as server:
        assert (
            await server.http.post(f"{NODE}/drain", headers=bearer_header(UNKNOWN_TOKEN))
        ).status_code == 202
        assert (await server.http.get("/openapi.json")).json().get("security") is None
        event = (await audit_events(server))[0]
        assert (event["kind"], event["data"]["principal"]) == ("audit.drain_node", "anonymous")  # type: ignore[index]


async def test_unknown_host_names_are_rejected(tmp_path: Path, ports: Ports) -> None:
    server_settings = settings_with_tokens(tmp_path, ports, tokens=[], host_names=["Tidevoy.example.org"])
    async with run_api_server(server_settings) as server:
        for host, status in (
            ("evil.example", 421),
            ("tidevoy.example.org.evil.example", 421),
            (f"{server_settings.api.listen}.evil.example", 421),
            ("tidevoy.example.org", 200),
            (server_settings.api.listen, 200),
            ("[::1]:3080", 200),
            ("localhost:3080", 200),
        ):
            # Host and Origin match, as in an attack by DNS rebinding: the browser sees one origin.
            fields = {"host": host, "origin": f"http://{host}"}
            assert (await server.http.get("/v1/nodes", headers=fields)).status_code == status, host
            drained = await server.http.post(f"{NODE}/drain", headers=fields)
            assert drained.status_code == (202 if status == 200 else 421), host
        assert problem_kind(await server.http.get("/", headers={"host": "evil.example"})) == "misdirected"
        async with await HttpConnection.open(server) as connection:
            connection.writer.write(f"POST {NODE}/drain HTTP/1.1\r\nHost:\r\nOrigin: null\r\n\r\n".encode())
            assert (await connection.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 403 ")
        async with await HttpConnection.open(server) as connection:
            connection.writer.write(b"GET /v1/nodes HTTP/1.0\r\n\r\n")
            assert (await connection.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_open_metrics_need_no_token(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(settings_with_tokens(tmp_path, ports, open_metrics=True)) as server:
        assert (await server.http.get("/metrics")).status_code == 200
        assert (await server.http.get("/v1/nodes")).status_code == 401


async def test_openapi_document_describes_authentication(server: ApiServer) -> None:
    document = (await server.http.get("/openapi.json", headers=bearer_header(VIEWER_TOKEN))).json()
    assert document["security"] == [{"token": []}, {"cookie": []}]
    assert set(document["components"]["securitySchemes"]) == {"token", "cookie"}
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert {"401", "403", "429"} <= set(document["paths"]["/v1/nodes"]["post"]["responses"])

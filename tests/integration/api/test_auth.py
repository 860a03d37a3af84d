"""Who may call: tokens, roles, the console's login, and what is told of it all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from controlplane.config.api import ApiTokenSettings
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server
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
NO_LIMIT = {"limits": {"refusals_per_second": 1000}}


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings_with_tokens(tmp_path, ports, **NO_LIMIT)) as plane:
        yield plane


def kind(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["type"]).removeprefix("urn:tidevoy:problem:")


async def told(plane: ApiServer) -> list[dict[str, object]]:
    """The audit events so far, the oldest first."""
    answer = await plane.http.get(
        "/v1/events?follow=false", headers={**bearer_header(OPERATOR_TOKEN), "last-event-id": "0"}
    )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return [event for event in events if event["kind"].startswith("audit.")]


def with_tokens(settings: Settings, *tokens: dict[str, str]) -> Settings:
    known = tuple(ApiTokenSettings.model_validate(token) for token in tokens)
    return settings.model_copy(update={"api": settings.api.model_copy(update={"tokens": known})})


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/config", "/openapi.json", "/metrics", "/", "/nowhere"])
async def test_nothing_is_told_to_whom_we_do_not_know(plane: ApiServer, path: str) -> None:
    for headers in (
        {},
        bearer_header(UNKNOWN_TOKEN),
        {"authorization": "Bearer"},
        {"authorization": f"Basic {OPERATOR_TOKEN}"},
        {"authorization": OPERATOR_TOKEN},
        {"cookie": f"tidevoy_token={UNKNOWN_TOKEN}"},
        {"cookie": f"other={OPERATOR_TOKEN}"},
    ):
        answer = await plane.http.get(path, headers=headers)
        assert (answer.status_code, kind(answer)) == (401, "unauthenticated"), headers
        assert answer.headers["www-authenticate"] == 'Bearer realm="tidevoy"'
        assert answer.headers["connection"] == "close"


async def test_two_tokens_are_none(plane: ApiServer) -> None:
    both = httpx2.Headers(
        [("authorization", f"Bearer {OPERATOR_TOKEN}"), ("authorization", f"Bearer {OPERATOR_TOKEN}")]
    )
    assert (await plane.http.get("/v1/nodes", headers=both)).status_code == 401


async def test_supervisors_need_no_token(plane: ApiServer) -> None:
    assert (await plane.http.get("/healthz")).status_code == 200
    assert (await plane.http.get("/readyz")).status_code in (200, 503)


async def test_a_viewer_reads_and_changes_nothing(plane: ApiServer) -> None:
    viewer = bearer_header(VIEWER_TOKEN)
    for path in ("/v1/nodes", NODE, "/v1/envoys", "/v1/config", "/metrics", "/openapi.json"):
        assert (await plane.http.get(path, headers=viewer)).status_code == 200
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
        answer = await plane.http.request(method, path, headers=viewer)
        assert (answer.status_code, kind(answer)) == (403, "forbidden")
    node = (await plane.http.get(NODE, headers=viewer)).json()
    assert node["drain"] is None
    refused = [event["kind"] for event in await told(plane)]
    assert refused == [
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


async def test_what_is_written_is_told(plane: ApiServer) -> None:
    operator = bearer_header(OPERATOR_TOKEN)
    assert (await plane.http.post(f"{NODE}/drain", headers=operator)).status_code == 202
    assert (await plane.http.post("/v1/nodes/127.0.0.1:1/drain", headers=operator)).status_code == 404
    assert (await plane.http.post(f"{NODE}/drain", headers=bearer_header(VIEWER_TOKEN))).status_code == 403
    seen = [(event["subject"], event["data"]) for event in await told(plane)]
    anna = {"who": "anna", "role": "operator", "from": "127.0.0.1"}
    vera = {"who": "vera", "role": "viewer", "from": "127.0.0.1"}
    assert seen == [
        ("127.0.0.1:4000", {**anna, "outcome": "done", "status": 202}),
        ("127.0.0.1:1", {**anna, "outcome": "failed", "status": 404}),
        ("127.0.0.1:4000", {**vera, "outcome": "refused", "status": 403}),
    ]


async def test_nobody_washes_away_what_others_did(plane: ApiServer) -> None:
    assert (await plane.http.post(f"{NODE}/drain", headers=bearer_header(OPERATOR_TOKEN))).status_code == 202
    for _ in range(50):
        await plane.http.post(f"{NODE}/undrain", headers=bearer_header(VIEWER_TOKEN))
        await plane.http.post("/login", data={"token": VIEWER_TOKEN})
    plane.http.cookies.clear()
    for _ in range(10):  # by whom we do not know
        for path in ("/logout", "/login"):
            await plane.http.post(path, headers={"cookie": "tidevoy_token=x", "origin": "https://evil"})
            await plane.http.post(path, headers={"cookie": "tidevoy_token=x", "origin": plane.url})
    kinds = [event["kind"] for event in await told(plane)]
    assert kinds[0] == "audit.drain_node"
    assert 10 <= len([kind for kind in kinds if kind in ("audit.undrain_node", "audit.login")]) <= 15
    assert set(kinds) <= {"audit.drain_node", "audit.undrain_node", "audit.login", "audit.unauthenticated"}


async def test_wrong_tokens_are_counted_and_told_rarely(plane: ApiServer) -> None:
    for _ in range(40):
        await plane.http.get("/v1/nodes", headers=bearer_header(UNKNOWN_TOKEN))
    metrics = (await plane.http.get("/metrics", headers=bearer_header(VIEWER_TOKEN))).text
    assert 'tidevoy_api_refused_total{reason="wrong_token"} 40.0' in metrics
    events = [event for event in await told(plane) if event["kind"] == "audit.unauthenticated"]
    assert 1 <= len(events) <= 8
    assert UNKNOWN_TOKEN not in str(events)


async def test_tokens_come_and_go_by_a_reload(plane: ApiServer) -> None:
    before = plane.next_settings
    plane.next_settings = with_tokens(before, TOKENS[0])
    assert (await plane.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200
    changed = (await plane.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))).json()
    assert changed["now"] == ["api.tokens"]
    assert (await plane.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 401
    plane.next_settings = with_tokens(before, TOKENS[0], {**TOKENS[1], "name": "next"})
    await plane.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))
    assert (await plane.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200


async def test_an_open_stream_ends_with_its_token(plane: ApiServer) -> None:
    plane.next_settings = with_tokens(plane.next_settings, TOKENS[0])
    async with await HttpConnection.open(plane) as kept, await HttpConnection.open(plane) as lost:
        for wire, token in ((kept, OPERATOR_TOKEN), (lost, VIEWER_TOKEN)):
            wire.send("GET", "/v1/events", f"Authorization: Bearer {token}")
            await wire.reader.readuntil(b": tidevoy\n\n")
        await plane.http.post("/v1/config/reload", headers=bearer_header(OPERATOR_TOKEN))
        # What is told next is the end of the one, and an event for the other.
        assert (
            await plane.http.post(f"{NODE}/drain", headers=bearer_header(OPERATOR_TOKEN))
        ).status_code == 202
        async with asyncio.timeout(10):
            assert b"drain" not in await lost.reader.readuntil(b"0\r\n\r\n")
            await kept.reader.readuntil(b"intent.drain")


async def test_every_answer_has_the_headers_that_guard_a_browser(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as wire:
        answers = [await wire.request("GET", "/healthz"), await wire.request("GET", "/v1/nodes")]
    async with await HttpConnection.open(plane) as wire:
        answers.append(await wire.request("GET", "/v1/nodes"))
    async with await HttpConnection.open(plane) as wire:
        answers.append(await wire.request("GET", "/v1/nodes", f"Authorization: Bearer {OPERATOR_TOKEN}"))
        answers.append(await wire.request("POST", "/nowhere", f"Authorization: Bearer {OPERATOR_TOKEN}"))
    assert [status for status, _, _ in answers] == [200, 401, 401, 200, 404]
    for _, headers, _ in answers:
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "strict-transport-security" not in headers


async def test_a_refused_request_is_the_last_of_its_connection(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as wire:
        assert (await wire.request("GET", "/healthz"))[0] == 200
        status, headers, _ = await wire.request("GET", "/v1/nodes", f"Authorization: Bearer {UNKNOWN_TOKEN}")
        assert (status, headers["connection"]) == (401, "close")
        assert await wire.read_to_end() == b""


async def test_an_answer_reaches_a_client_that_is_still_sending(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as wire:
        status, _, body = await wire.request("POST", "/v1/nodes", "Content-Length: 400000")
        assert status == 401
        assert b"unauthenticated" in body
        wire.writer.write(b"x" * 400_000)
        assert await wire.read_to_end() == b""


# --- browsers ---


async def test_a_person_is_sent_to_the_login(plane: ApiServer) -> None:
    page = {"accept": "text/html,*/*"}
    answer = await plane.http.get("/", headers=page)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    answer = await plane.http.get("/nodes/a b", headers=page)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/nodes/a%20b")
    answer = await plane.http.get("/v1/nodes", headers={**page, "hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login")


async def test_a_login_gives_a_cookie_that_is_as_good_as_the_token(plane: ApiServer) -> None:
    answer = await plane.http.post("/login", data={"token": OPERATOR_TOKEN, "next": "/nodes"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/nodes")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"tidevoy_token={OPERATOR_TOKEN}; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    plane.http.cookies.clear()
    shown = {"cookie": f"tidevoy_token={OPERATOR_TOKEN}"}
    assert (await plane.http.get("/v1/nodes", headers=shown)).status_code == 200
    ours, foreign = {"origin": plane.url}, {"origin": "https://evil.example"}
    for origin, status in ((foreign, 403), ({"origin": "null"}, 403), ({}, 403), (ours, 202)):
        drained = await plane.http.post(f"{NODE}/drain", headers={**shown, **origin})
        assert drained.status_code == status, origin
    left = await plane.http.post("/logout", headers={**shown, **ours})
    assert (left.status_code, left.headers["location"]) == (303, "/login?left=1")
    assert "Max-Age=0" in left.headers["set-cookie"]
    assert {"audit.login", "audit.logout"} <= {str(event["kind"]) for event in await told(plane)}


@pytest.mark.parametrize("token", [UNKNOWN_TOKEN, "", OPERATOR_TOKEN[:-1], "\u00e4"])
async def test_a_login_with_a_wrong_token(plane: ApiServer, token: str) -> None:
    answer = await plane.http.post("/login", data={"token": token, "next": "/nodes"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?refused=1&next=/nodes")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nb", "x"]
)
async def test_a_login_leads_to_no_other_host(plane: ApiServer, wanted: str) -> None:
    answer = await plane.http.post("/login", data={"token": VIEWER_TOKEN, "next": wanted})
    assert answer.headers["location"] == "/"


async def test_a_page_of_others_cannot_log_somebody_in(plane: ApiServer) -> None:
    foreign = {"origin": "https://evil.example"}
    answer = await plane.http.post("/login", data={"token": VIEWER_TOKEN}, headers=foreign)
    assert (answer.status_code, kind(answer)) == (403, "foreign-origin")


# --- without tokens ---


async def test_where_nobody_is_asked_everybody_is_an_operator(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(settings_with_tokens(tmp_path, ports, tokens=[])) as plane:
        assert (
            await plane.http.post(f"{NODE}/drain", headers=bearer_header(UNKNOWN_TOKEN))
        ).status_code == 202
        assert (await plane.http.get("/openapi.json")).json().get("security") is None
        event = (await told(plane))[0]
        assert (event["kind"], event["data"]["who"]) == ("audit.drain_node", "anonymous")  # type: ignore[index]


async def test_a_name_of_others_leads_nowhere(tmp_path: Path, ports: Ports) -> None:
    wanted = settings_with_tokens(tmp_path, ports, tokens=[], host_names=["Tidevoy.example.org"])
    async with run_api_server(wanted) as plane:
        for host, status in (
            ("evil.example", 421),
            ("tidevoy.example.org.evil.example", 421),
            (f"{wanted.api.listen}.evil.example", 421),
            ("tidevoy.example.org", 200),
            (wanted.api.listen, 200),
            ("[::1]:3080", 200),
            ("localhost:3080", 200),
        ):
            # A page there is one of ours to a browser.
            fields = {"host": host, "origin": f"http://{host}"}
            assert (await plane.http.get("/v1/nodes", headers=fields)).status_code == status, host
            drained = await plane.http.post(f"{NODE}/drain", headers=fields)
            assert drained.status_code == (202 if status == 200 else 421), host
        assert kind(await plane.http.get("/", headers={"host": "evil.example"})) == "misdirected"
        async with await HttpConnection.open(plane) as wire:
            wire.writer.write(f"POST {NODE}/drain HTTP/1.1\r\nHost:\r\nOrigin: null\r\n\r\n".encode())
            assert (await wire.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 403 ")
        async with await HttpConnection.open(plane) as wire:
            wire.writer.write(b"GET /v1/nodes HTTP/1.0\r\n\r\n")
            assert (await wire.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_metrics_may_be_open(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(settings_with_tokens(tmp_path, ports, open_metrics=True)) as plane:
        assert (await plane.http.get("/metrics")).status_code == 200
        assert (await plane.http.get("/v1/nodes")).status_code == 401


async def test_the_description_says_how_to_call(plane: ApiServer) -> None:
    document = (await plane.http.get("/openapi.json", headers=bearer_header(VIEWER_TOKEN))).json()
    assert document["security"] == [{"token": []}, {"cookie": []}]
    assert set(document["components"]["securitySchemes"]) == {"token", "cookie"}
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert {"401", "403", "429"} <= set(document["paths"]["/v1/nodes"]["post"]["responses"])

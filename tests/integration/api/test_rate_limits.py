"""Rate and size limits of the REST server, and the client address to which it attributes a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, stored_events
from tests.support.controlplane.authenticated_api import (
    OPERATOR_TOKEN,
    UNKNOWN_TOKEN,
    VIEWER_TOKEN,
    HttpConnection,
    bearer_header,
    settings_with_tokens,
)
from tests.support.waiting import wait_until

WRONG_TOKEN, VALID_TOKEN = (f"Authorization: Bearer {token}" for token in (UNKNOWN_TOKEN, OPERATOR_TOKEN))
ATTACKER, NEIGHBOUR = "127.0.0.2", "127.0.0.3"
LIMITS = {"unauthenticated_requests_per_second": 1, "connections": 8}  # allows bursts of 5 requests


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings_with_tokens(tmp_path, ports, limits=LIMITS)) as server:
        yield server


async def request_until_limited(
    server: ApiServer, source: str, *fields: str, path: str = "/v1/nodes"
) -> list[int]:
    """Send requests from `source` until one gets 429; return the statuses of the requests before it."""
    statuses: list[int] = []
    while len(statuses) < 100:
        async with await HttpConnection.open(server, source) as connection:
            status, headers, body = await connection.request("GET", path, *fields)
        if status == 429:
            assert int(headers["retry-after"]) >= 1
            assert headers["content-type"] == "application/problem+json"
            assert b"urn:tidevoy:problem:too-many-requests" in body
            return statuses
        statuses.append(status)
    raise AssertionError("the rate is not limited")


@pytest.mark.parametrize(
    ("fields", "path", "status"),
    [((), "/v1/nodes", 401), ((WRONG_TOKEN,), "/v1/nodes", 401), ((), "/healthz", 200)],
    ids=["no token", "wrong token", "public path"],
)
async def test_unauthenticated_requests_are_limited_per_address(
    server: ApiServer, fields: tuple[str, ...], path: str, status: int
) -> None:
    statuses = await request_until_limited(server, ATTACKER, *fields, path=path)
    assert 5 <= len(statuses) <= 10
    assert set(statuses) == {status}
    async with await HttpConnection.open(server, NEIGHBOUR) as connection:
        assert (await connection.request("GET", path, *fields))[0] == status
    # Requests with valid credentials from the same address are not limited.
    async with await HttpConnection.open(server, ATTACKER) as connection:
        for _ in range(30):
            assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200


async def test_wrong_logins_are_limited(server: ApiServer) -> None:
    statuses = [
        (await server.http.post("/login", data={"token": UNKNOWN_TOKEN})).status_code for _ in range(12)
    ]
    assert set(statuses) == {303, 429}


async def test_client_address_is_not_taken_from_untrusted_peers(server: ApiServer) -> None:
    for number in range(12):
        await server.http.get("/v1/nodes", headers={"x-forwarded-for": f"10.0.0.{number}"})
    assert (await server.http.get("/v1/nodes")).status_code == 429


async def test_trusted_proxies_name_the_client_address(tmp_path: Path, ports: Ports) -> None:
    proxies = ["127.0.0.0/8", "10.1.0.0/16"]
    settings = settings_with_tokens(tmp_path, ports, limits=LIMITS, trusted_proxies=proxies)
    async with run_api_server(settings) as server:

        async def status(forwarded_for: str) -> int:
            headers = {"x-forwarded-for": forwarded_for}
            return (await server.http.get("/v1/nodes", headers=headers)).status_code

        # A client can forge the first address. The server uses the last address outside the trusted networks.
        statuses = [await status(f"192.0.2.{number}, 203.0.113.9, 10.1.2.3") for number in range(12)]
        assert set(statuses) == {401, 429}
        assert await status("203.0.113.10, 10.1.2.3") == 401
        events = str(await stored_events(server.http, **bearer_header(VIEWER_TOKEN)))
        assert "203.0.113.9" in events
        assert "192.0.2." not in events


async def test_connections_are_limited(server: ApiServer) -> None:
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(await HttpConnection.open(server)) for _ in range(8)]
        for connection in connections:
            assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
        async with await HttpConnection.open(server) as ninth:
            # The connections within the limit are still served.
            metrics = (await connections[0].request("GET", "/metrics", VALID_TOKEN))[2]
            assert b"tidevoy_api_connections 9.0" in metrics
            assert (await ninth.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 503
        connections[1].writer.transport.abort()

        async def has_room() -> bool:
            async with await HttpConnection.open(server) as replacement:
                return (await replacement.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200

        await wait_until(has_room)


async def test_size_of_bodies_is_limited(server: ApiServer) -> None:
    too_large = await server.http.post("/login", data={"token": "x" * 9000})
    assert (too_large.status_code, problem_kind(too_large)) == (413, "too-large")
    body = {"address": "x" * 600_000}
    too_large = await server.http.post("/v1/nodes", json=body, headers=bearer_header(OPERATOR_TOKEN))
    assert (too_large.status_code, problem_kind(too_large)) == (413, "too-large")


async def test_client_that_sends_a_huge_body_is_disconnected(server: ApiServer) -> None:
    async with await HttpConnection.open(server) as connection:
        connection.send(
            "POST", "/v1/nodes", VALID_TOKEN, "Content-Type: application/json", "Content-Length: 9000000"
        )
        # At this size or above, the server stops reading and closes the connection. If the test sent more,
        # bytes would remain unread, so the kernel could reset the connection before the response arrives.
        connection.writer.write(b"x" * 4_194_305)
        assert (await connection.read_to_end()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 70_000,
        b"\x16\x03\x01\x02\x00",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
    ],
    ids=["oversized head", "TLS", "not HTTP", "unknown version"],
)
async def test_invalid_http_is_rejected(server: ApiServer, head: bytes) -> None:
    async with await HttpConnection.open(server) as connection:
        connection.writer.write(head)
        head, _, _ = (await connection.read_to_end()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: text/plain" in head


async def test_each_pipelined_request_is_authorized(server: ApiServer) -> None:
    async with await HttpConnection.open(server) as connection:
        connection.send("GET", "/v1/nodes", VALID_TOKEN)
        connection.send("GET", "/v1/nodes", WRONG_TOKEN)
        responses = await connection.read_to_end()
    assert responses.count(b"HTTP/1.1 200") == 1
    assert responses.count(b"HTTP/1.1 401") == 1

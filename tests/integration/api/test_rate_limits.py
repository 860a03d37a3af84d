"""Rate and resource limits of the REST server: excess requests are rejected, other callers are unaffected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api.auth import http_protocol, middleware
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server
from tests.support.controlplane.authenticated_api import (
    OPERATOR_TOKEN,
    UNKNOWN_TOKEN,
    VIEWER_TOKEN,
    HttpConnection,
    bearer_header,
    is_connection_dropped,
    settings_with_tokens,
)
from tests.support.waiting import wait_until

WRONG_TOKEN, VALID_TOKEN = (f"Authorization: Bearer {token}" for token in (UNKNOWN_TOKEN, OPERATOR_TOKEN))
ATTACKER, NEIGHBOUR = "127.0.0.2", "127.0.0.3"


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings_with_tokens(tmp_path, ports)) as plane:
        yield plane


async def attack(plane: ApiServer, source: str) -> int:
    """Send wrong tokens from `source` until it is banned; return the number of denied requests."""
    denied = 0
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        while denied < 1000 and not await is_connection_dropped(plane, source):
            async with await HttpConnection.open(plane, source) as connection:
                assert (await connection.request("GET", "/v1/nodes", WRONG_TOKEN))[0] == 401
                denied += 1
    return denied


async def metric_value(plane: ApiServer, prefix: str) -> float:
    """Return the value of the first metric line with this prefix; 0 if there is none."""
    text = (await plane.http.get("/metrics", headers=bearer_header(VIEWER_TOKEN))).text
    values = (float(line.split(" ")[-1]) for line in text.splitlines() if line.startswith(prefix))
    return next(values, 0.0)


async def test_address_that_guesses_tokens_is_banned_and_no_other(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane, ATTACKER) as open_connection:
        assert (await open_connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
        assert 30 <= await attack(plane, ATTACKER) < 100
        assert await is_connection_dropped(plane, ATTACKER)
        assert await metric_value(plane, "tidevoy_api_banned_sources") == 1
        # Neither open connections from that address nor other addresses are affected.
        assert (await open_connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
        async with await HttpConnection.open(plane, NEIGHBOUR) as connection:
            assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
    assert (await plane.http.get("/v1/nodes", headers=bearer_header(OPERATOR_TOKEN))).status_code == 200


async def test_connections_per_address_are_limited(tmp_path: Path, ports: Ports) -> None:
    limits = {"connections_per_source": 4, "refusals_per_second": 1000}
    async with (
        run_api_server(settings_with_tokens(tmp_path, ports, limits=limits)) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        connections = [
            await stack.enter_async_context(await HttpConnection.open(plane, ATTACKER)) for _ in range(4)
        ]
        for connection in connections:
            assert (await connection.request("GET", "/healthz"))[0] == 200
        async with await HttpConnection.open(plane, ATTACKER) as fifth:
            assert await fifth.read_to_end() == b""
        assert (await plane.http.get("/v1/nodes", headers=bearer_header(OPERATOR_TOKEN))).status_code == 200
        connections[0].writer.transport.abort()

        async def has_room() -> bool:
            try:
                async with await HttpConnection.open(plane, ATTACKER) as replacement:
                    return (await replacement.request("GET", "/healthz"))[0] == 200
            except (OSError, asyncio.IncompleteReadError):
                return False

        await wait_until(has_room)


async def test_total_connections_are_limited(tmp_path: Path, ports: Ports) -> None:
    async with (
        run_api_server(settings_with_tokens(tmp_path, ports, limits={"connections": 8})) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        async with await HttpConnection.open(plane, NEIGHBOUR) as connection:
            assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
        # A quarter of the connections is reserved for trusted addresses.
        for source, field in (*((n, "X: y") for n in range(10, 16)), (3, VALID_TOKEN), (3, VALID_TOKEN)):
            connection = await stack.enter_async_context(
                await HttpConnection.open(plane, f"127.0.0.{source}")
            )
            assert (await connection.request("GET", "/healthz", field))[0] == 200
            if source == 15:
                async with await HttpConnection.open(plane, ATTACKER) as seventh:
                    assert await seventh.read_to_end() == b""
        async with await HttpConnection.open(plane, NEIGHBOUR) as ninth:
            assert await ninth.read_to_end() == b""


async def test_request_rate_per_caller_is_limited(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(
        settings_with_tokens(tmp_path, ports, limits={"requests_per_second": 2})
    ) as plane:
        async with await HttpConnection.open(plane) as connection:
            results = [(await connection.request("GET", "/v1/nodes", VALID_TOKEN))[:2] for _ in range(14)]
        statuses = [status for status, _ in results]
        assert statuses[:10] == [200] * 10
        assert statuses[-1] == 429  # on the same connection
        assert results[-1][1]["retry-after"] == "1"
        # Another caller from the same address has its own limit.
        assert (await plane.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200


async def test_unauthenticated_health_checks_are_rate_limited(plane: ApiServer) -> None:
    statuses = set()
    async with await HttpConnection.open(plane, ATTACKER) as connection:
        with contextlib.suppress(asyncio.IncompleteReadError):
            for _ in range(300):
                statuses.add((await connection.request("GET", "/healthz"))[0])
    assert statuses == {200, 429}


async def test_denied_requests_are_rate_limited(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(
        settings_with_tokens(tmp_path, ports, limits={"requests_per_second": 2})
    ) as plane:
        async with await HttpConnection.open(plane) as connection:
            drain = "/v1/nodes/127.0.0.1:4000/drain"
            viewer = f"Authorization: Bearer {VIEWER_TOKEN}"
            statuses = [(await connection.request("POST", drain, viewer))[0] for _ in range(14)]
        assert statuses[:10] == [403] * 10
        assert 429 in statuses
    async with run_api_server(settings_with_tokens(tmp_path, ports)) as plane:
        statuses = []
        for _ in range(200):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with await HttpConnection.open(plane, ATTACKER) as connection:
                    statuses.append(
                        (await connection.request("POST", "/login", "Origin: https://evil.example"))[0]
                    )
            if 429 in statuses:
                break
        assert set(statuses) == {403, 429}


async def test_idle_connection_from_trusted_address_is_not_penalized(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await HttpConnection.open(plane) as connection:
        assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.1)
    async with await HttpConnection.open(plane) as spare:
        assert await spare.read_to_end() == b""
    async with await HttpConnection.open(plane, ATTACKER) as spare:
        assert await spare.read_to_end() == b""
    events = (
        await plane.http.get(
            "/v1/events?follow=false", headers={**bearer_header(VIEWER_TOKEN), "last-event-id": "0"}
        )
    ).text
    assert f"a request from {ATTACKER} was denied" in events
    assert "a request from 127.0.0.1 was denied" not in events


@pytest.mark.parametrize("part", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_incomplete_first_head_times_out(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.2)
    async with await HttpConnection.open(plane) as connection:
        connection.writer.write(part)
        assert await connection.read_to_end() == b""
    assert await metric_value(plane, 'tidevoy_api_denied_total{reason="slow_head"}') == 1


@pytest.mark.parametrize("part", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_incomplete_later_head_times_out(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    async with await HttpConnection.open(plane) as connection:
        assert (await connection.request("GET", "/healthz"))[0] == 200
        monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.2)
        connection.writer.write(part)
        assert await connection.read_to_end() == b""


async def test_idle_connection_stays_open(plane: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.1)
    async with await HttpConnection.open(plane) as connection:
        assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200
        await asyncio.sleep(0.4)
        assert (await connection.request("GET", "/v1/nodes", VALID_TOKEN))[0] == 200


async def test_missing_body_times_out(plane: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_SECONDS", 0.2)
    async with await HttpConnection.open(plane) as connection:
        status, headers, _ = await connection.request("POST", "/v1/nodes", VALID_TOKEN, "Content-Length: 10")
        assert (status, headers["connection"]) == (408, "close")
        await connection.read_to_end()


async def test_body_of_unauthenticated_caller_is_limited(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_SECONDS", 0.5)
    form = "Content-Type: application/x-www-form-urlencoded"
    async with await HttpConnection.open(plane, ATTACKER) as connection:
        connection.send("POST", "/login", form, "Content-Length: 9000")
        connection.writer.write(b"x" * 9000)
        assert (await connection.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
    # A client that announces more than it sends runs into the timeout.
    async with await HttpConnection.open(plane, ATTACKER) as connection:
        connection.send("POST", "/login", form, "Content-Length: 9000000")
        connection.writer.write(b"x" * 9000)
        assert (await connection.read_to_end()).startswith(b"HTTP/1.1 408 ")


async def test_endless_head_is_rejected(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as connection:
        connection.writer.write(b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"x" * 70_000)
        await connection.read_to_end()
    assert await metric_value(plane, 'tidevoy_api_denied_total{reason="head_too_large"}') == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 200 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 17_000 + b"\r\n\r\n",
    ],
)
@pytest.mark.parametrize("prefix", [b"", b"\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_oversized_head_in_one_piece_is_rejected(plane: ApiServer, prefix: bytes, head: bytes) -> None:
    async with await HttpConnection.open(plane) as connection:
        connection.writer.write(prefix + head)
        responses = await connection.read_to_end()
    assert responses.count(b"HTTP/1.1 200") == prefix.count(b"GET")


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01\x02\x00", b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n"]
)
async def test_invalid_http_is_rejected(plane: ApiServer, first: bytes) -> None:
    async with await HttpConnection.open(plane) as connection:
        connection.writer.write(first)
        assert (await connection.read_to_end()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))


async def test_accepts_head_in_pieces_and_authorizes_each_pipelined_request(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as connection:
        for byte in f"GET /v1/nodes HTTP/1.1\nHost: x\n{VALID_TOKEN}\n\n".encode():
            connection.writer.write(bytes([byte]))
            await connection.writer.drain()
        assert (await connection.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    async with await HttpConnection.open(plane) as connection:
        # The second request is authorized by its own credentials.
        connection.send("GET", "/v1/nodes", VALID_TOKEN)
        connection.send("GET", "/v1/nodes", WRONG_TOKEN)
        responses = await connection.read_to_end()
    assert responses.count(b"HTTP/1.1 200") == 1
    assert responses.count(b"HTTP/1.1 401") == 1

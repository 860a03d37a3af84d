"""What a caller may take of the REST server: too much of it is refused, and nobody else notices."""

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

WRONG, RIGHT = (f"Authorization: Bearer {token}" for token in (UNKNOWN_TOKEN, OPERATOR_TOKEN))
ATTACKER, NEIGHBOUR = "127.0.0.2", "127.0.0.3"


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings_with_tokens(tmp_path, ports)) as plane:
        yield plane


async def attack(plane: ApiServer, source: str) -> int:
    """Wrong tokens from there until nothing is heard any more; answers how many were refused."""
    refused = 0
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        while refused < 1000 and not await is_connection_dropped(plane, source):
            async with await HttpConnection.open(plane, source) as wire:
                assert (await wire.request("GET", "/v1/nodes", WRONG))[0] == 401
                refused += 1
    return refused


async def figure(plane: ApiServer, line: str) -> float:
    text = (await plane.http.get("/metrics", headers=bearer_header(VIEWER_TOKEN))).text
    return next((float(each.split(" ")[-1]) for each in text.splitlines() if each.startswith(line)), 0.0)


async def test_an_address_that_guesses_is_shut_out_and_nobody_else(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane, ATTACKER) as kept:
        assert (await kept.request("GET", "/v1/nodes", RIGHT))[0] == 200
        assert 30 <= await attack(plane, ATTACKER) < 100
        assert await is_connection_dropped(plane, ATTACKER)
        assert await figure(plane, "tidevoy_api_sources_shut_out") == 1
        # Somebody there whose connection is open notices nothing, nor does anybody elsewhere.
        assert (await kept.request("GET", "/v1/nodes", RIGHT))[0] == 200
        async with await HttpConnection.open(plane, NEIGHBOUR) as wire:
            assert (await wire.request("GET", "/v1/nodes", RIGHT))[0] == 200
    assert (await plane.http.get("/v1/nodes", headers=bearer_header(OPERATOR_TOKEN))).status_code == 200


async def test_connections_of_one_address_are_limited(tmp_path: Path, ports: Ports) -> None:
    limits = {"connections_per_source": 4, "refusals_per_second": 1000}
    async with (
        run_api_server(settings_with_tokens(tmp_path, ports, limits=limits)) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        held = [await stack.enter_async_context(await HttpConnection.open(plane, ATTACKER)) for _ in range(4)]
        for wire in held:
            assert (await wire.request("GET", "/healthz"))[0] == 200
        async with await HttpConnection.open(plane, ATTACKER) as fifth:
            assert await fifth.read_to_end() == b""
        assert (await plane.http.get("/v1/nodes", headers=bearer_header(OPERATOR_TOKEN))).status_code == 200
        held[0].writer.transport.abort()

        async def has_room() -> bool:
            try:
                async with await HttpConnection.open(plane, ATTACKER) as again:
                    return (await again.request("GET", "/healthz"))[0] == 200
            except (OSError, asyncio.IncompleteReadError):
                return False

        await wait_until(has_room)


async def test_all_connections_are_limited(tmp_path: Path, ports: Ports) -> None:
    async with (
        run_api_server(settings_with_tokens(tmp_path, ports, limits={"connections": 8})) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        async with await HttpConnection.open(plane, NEIGHBOUR) as wire:
            assert (await wire.request("GET", "/v1/nodes", RIGHT))[0] == 200
        # A quarter of them is for addresses that are known.
        for source, field in (*((n, "X: y") for n in range(10, 16)), (3, RIGHT), (3, RIGHT)):
            wire = await stack.enter_async_context(await HttpConnection.open(plane, f"127.0.0.{source}"))
            assert (await wire.request("GET", "/healthz", field))[0] == 200
            if source == 15:
                async with await HttpConnection.open(plane, ATTACKER) as seventh:
                    assert await seventh.read_to_end() == b""
        async with await HttpConnection.open(plane, NEIGHBOUR) as ninth:
            assert await ninth.read_to_end() == b""


async def test_a_caller_that_asks_too_much_is_told_so(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(
        settings_with_tokens(tmp_path, ports, limits={"requests_per_second": 2})
    ) as plane:
        async with await HttpConnection.open(plane) as wire:
            seen = [(await wire.request("GET", "/v1/nodes", RIGHT))[:2] for _ in range(14)]
        statuses = [status for status, _ in seen]
        assert statuses[:10] == [200] * 10
        assert statuses[-1] == 429  # on the same connection
        assert seen[-1][1]["retry-after"] == "1"
        # Another caller, from the same address, has a limit of its own.
        assert (await plane.http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))).status_code == 200


async def test_a_stranger_may_ask_only_so_often_whether_we_live(plane: ApiServer) -> None:
    statuses = set()
    async with await HttpConnection.open(plane, ATTACKER) as wire:
        with contextlib.suppress(asyncio.IncompleteReadError):
            for _ in range(300):
                statuses.add((await wire.request("GET", "/healthz"))[0])
    assert statuses == {200, 429}


async def test_what_is_refused_is_also_limited(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(
        settings_with_tokens(tmp_path, ports, limits={"requests_per_second": 2})
    ) as plane:
        async with await HttpConnection.open(plane) as wire:
            drain = "/v1/nodes/127.0.0.1:4000/drain"
            shown = f"Authorization: Bearer {VIEWER_TOKEN}"
            statuses = [(await wire.request("POST", drain, shown))[0] for _ in range(14)]
        assert statuses[:10] == [403] * 10
        assert 429 in statuses
    async with run_api_server(settings_with_tokens(tmp_path, ports)) as plane:
        statuses = []
        for _ in range(200):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with await HttpConnection.open(plane, ATTACKER) as wire:
                    statuses.append((await wire.request("POST", "/login", "Origin: https://evil.example"))[0])
            if 429 in statuses:
                break
        assert set(statuses) == {403, 429}


async def test_a_spare_connection_of_who_is_known_is_no_offence(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await HttpConnection.open(plane) as wire:
        assert (await wire.request("GET", "/v1/nodes", RIGHT))[0] == 200
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
    assert f"a caller from {ATTACKER} was refused" in events
    assert "a caller from 127.0.0.1 was refused" not in events


@pytest.mark.parametrize("part", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_come(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.2)
    async with await HttpConnection.open(plane) as wire:
        wire.writer.write(part)
        assert await wire.read_to_end() == b""
    assert await figure(plane, 'tidevoy_api_refused_total{reason="slow_head"}') == 1


@pytest.mark.parametrize("part", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_later_head_that_does_not_come(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    async with await HttpConnection.open(plane) as wire:
        assert (await wire.request("GET", "/healthz"))[0] == 200
        monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.2)
        wire.writer.write(part)
        assert await wire.read_to_end() == b""


async def test_a_connection_at_rest_stays(plane: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_HEAD_TIMEOUT_SECONDS", 0.1)
    async with await HttpConnection.open(plane) as wire:
        assert (await wire.request("GET", "/v1/nodes", RIGHT))[0] == 200
        await asyncio.sleep(0.4)
        assert (await wire.request("GET", "/v1/nodes", RIGHT))[0] == 200


async def test_a_body_that_does_not_come(plane: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_SECONDS", 0.2)
    async with await HttpConnection.open(plane) as wire:
        status, headers, _ = await wire.request("POST", "/v1/nodes", RIGHT, "Content-Length: 10")
        assert (status, headers["connection"]) == (408, "close")
        await wire.read_to_end()


async def test_who_may_only_log_in_sends_no_more_than_that(
    plane: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_SECONDS", 0.5)
    form = "Content-Type: application/x-www-form-urlencoded"
    async with await HttpConnection.open(plane, ATTACKER) as wire:
        wire.send("POST", "/login", form, "Content-Length: 9000")
        wire.writer.write(b"x" * 9000)
        assert (await wire.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
    # Whoever says that there is more, and does not send it, is not waited for for ever.
    async with await HttpConnection.open(plane, ATTACKER) as wire:
        wire.send("POST", "/login", form, "Content-Length: 9000000")
        wire.writer.write(b"x" * 9000)
        assert (await wire.read_to_end()).startswith(b"HTTP/1.1 408 ")


async def test_a_head_without_end(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as wire:
        wire.writer.write(b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"x" * 70_000)
        await wire.read_to_end()
    assert await figure(plane, 'tidevoy_api_refused_total{reason="head_too_large"}') == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 200 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 17_000 + b"\r\n\r\n",
    ],
)
@pytest.mark.parametrize("before", [b"", b"\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_head_that_is_too_large_also_in_one_piece(
    plane: ApiServer, before: bytes, head: bytes
) -> None:
    async with await HttpConnection.open(plane) as wire:
        wire.writer.write(before + head)
        answers = await wire.read_to_end()
    assert answers.count(b"HTTP/1.1 200") == before.count(b"GET")


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01\x02\x00", b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n"]
)
async def test_what_is_no_http(plane: ApiServer, first: bytes) -> None:
    async with await HttpConnection.open(plane) as wire:
        wire.writer.write(first)
        assert (await wire.read_to_end()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))


async def test_a_head_in_pieces_and_two_requests_in_one(plane: ApiServer) -> None:
    async with await HttpConnection.open(plane) as wire:
        for byte in f"GET /v1/nodes HTTP/1.1\nHost: x\n{RIGHT}\n\n".encode():
            wire.writer.write(bytes([byte]))
            await wire.writer.drain()
        assert (await wire.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    async with await HttpConnection.open(plane) as wire:
        # The second one is judged by what it shows itself.
        wire.send("GET", "/v1/nodes", RIGHT)
        wire.send("GET", "/v1/nodes", WRONG)
        answers = await wire.read_to_end()
    assert answers.count(b"HTTP/1.1 200") == 1
    assert answers.count(b"HTTP/1.1 401") == 1

"""`/v1/events` over HTTP: order, resumption, heartbeats, and the end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.routes import events as route
from controlplane.clock import monotonic_unix_clock
from controlplane.events.event_log import EventLog
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings, stored_events


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports)) as server:
        yield server


Events = AsyncIterator[httpx2.ServerSentEvent]


@asynccontextmanager
async def listen(server: ApiServer, **headers: str) -> AsyncIterator[Events]:
    async with server.http.stream("GET", "/v1/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        yield aiter(httpx2.EventSource(response))


async def wait_for_kind(events: Events, kind: str) -> tuple[httpx2.ServerSentEvent, dict[str, Any]]:
    async with asyncio.timeout(10):
        async for event in events:
            data: Any = event.json()
            if data["kind"] == kind:
                return event, data
    raise AssertionError(f"the stream ended without {kind}")


async def stored_ids(server: ApiServer, after: int) -> list[int]:
    return [event["id"] for event in await stored_events(server.http, after)]


async def test_events_are_streamed_as_they_happen(server: ApiServer) -> None:
    async with listen(server) as events:
        waiting = asyncio.create_task(wait_for_kind(events, "node.discovered"))
        await server.http.post("/v1/nodes", json={"address": "127.0.0.1:1"})
        event, data = await waiting
        assert event.event == "node"
        assert data["subject"] == "127.0.0.1:1"
        assert str(data["id"]) == event.id


async def test_client_resumes_after_the_last_event_id(server: ApiServer) -> None:
    for number in range(1, 4):
        await server.http.post("/v1/nodes", json={"address": f"127.0.0.1:{number}"})
    all_ids = await stored_ids(server, 0)
    assert all_ids == sorted(set(all_ids))
    middle = all_ids[len(all_ids) // 2]
    assert await stored_ids(server, middle) == [event_id for event_id in all_ids if event_id > middle]
    async with listen(server, **{"Last-Event-ID": str(middle)}) as events:
        assert int((await anext(events)).id) > middle


@pytest.mark.parametrize("value", ["x", "-1", "1.5", str(2**63)])
async def test_invalid_last_event_id_is_rejected(server: ApiServer, value: str) -> None:
    response = await server.http.get("/v1/events", headers={"Last-Event-ID": value})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "last-event-id"


async def test_streams_end_when_the_server_stops(server: ApiServer) -> None:
    async with listen(server) as events:
        waiting = asyncio.create_task(anext(events, None))
        await server.http.get("/healthz")
        loop = asyncio.get_running_loop()
        start = loop.time()
        server.serving.cancel()
        async with asyncio.timeout(10):
            assert await waiting is None  # the body is complete; a broken connection would raise
            await asyncio.wait({server.serving})
        assert loop.time() - start < 2.0


async def test_idle_stream_sends_heartbeats_and_closes_its_subscription() -> None:
    log = EventLog(monotonic_unix_clock())
    events = log.subscribe()
    chunks = route.iter_sse_events(events, asyncio.Event(), heartbeat=0.02)
    first = await anext(chunks)
    assert [first, await anext(chunks), await anext(chunks)] == [": tidevoy\n\n", *[": alive\n\n"] * 2]
    before = asyncio.all_tasks()
    assert len(before) == 3  # this test, the wait for the stop, the wait for an event
    await chunks.aclose()
    assert len(asyncio.all_tasks()) == 1
    log.emit("node.state", "a:1", "it is active")
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_stream_ends_when_the_event_log_closes() -> None:
    log = EventLog(monotonic_unix_clock())
    log.emit("node.state", "a:1", "it is active")
    chunks = route.iter_sse_events(log.subscribe(0), asyncio.Event())
    await anext(chunks)
    assert "event: node\n" in await anext(chunks)
    log.close()
    assert [chunk async for chunk in chunks] == []

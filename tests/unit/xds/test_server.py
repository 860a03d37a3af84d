"""The xDS server without its port: pushes, failed pushes, and the stream of one Envoy."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import grpc
import pytest
from envoy.service.discovery.v3 import discovery_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config.settings import Settings
from controlplane.model.plan import Plan
from controlplane.xds.resource_type import CLUSTER
from controlplane.xds.server import MAX_DELAY_SECONDS, QUIET_SECONDS, next_push_at
from controlplane.xds.subscription import SotwSubscription
from tests.support.controlplane.running_xds import RecordedEvents, make_xds_server


class FakeContext:
    """The gRPC stream of one Envoy, from the server's side."""

    def __init__(self, **first_request: Any) -> None:
        self.requests, self.responses = asyncio.Queue[Any](), asyncio.Queue[bytes]()
        self.aborted_with: list[Any] = []
        self.request(node={"id": "envoy-1"}, **first_request)

    def request(self, **fields: Any) -> None:
        request = discovery_pb2.DiscoveryRequest(**{"type_url": CLUSTER.url, **fields})
        self.requests.put_nowait(request.SerializeToString())

    async def next_response(self) -> Any:
        async with asyncio.timeout(30):
            return discovery_pb2.DiscoveryResponse.FromString(await self.responses.get())

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: bytes) -> None:
        self.responses.put_nowait(message)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.aborted_with.append(code)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "ipv4:10.0.0.9:5000"

    def auth_context(self) -> dict[str, Any]:
        return {}


async def test_serves_an_envoy_until_its_stream_ends() -> None:
    events, context = RecordedEvents(), FakeContext()
    server = make_xds_server(Settings(), events)
    stream = asyncio.create_task(server._serve(SotwSubscription, None, cast(Any, context)))
    server.publish(Plan(), at_once=True)
    response = await context.next_response()
    context.request(response_nonce=response.nonce, error_detail={"message": "no"})
    settings = Settings.model_validate({"backend": {"connect_timeout": 3}})
    server.configure(settings)
    server.publish(Plan(), at_once=True)
    assert (await context.next_response()).version_info != response.version_info
    (status,) = server.statuses()
    assert (status.address, status.nacks, status.connected_since is None) == ("10.0.0.9:5000", 1, False)
    context.requests.put_nowait(grpc.aio.EOF)
    await stream
    (status,) = server.statuses()
    assert status.connected_since is None
    assert [kind for kind, _, _ in events.recorded] == ["envoy.connected", "envoy.nack", "envoy.disconnected"]


@pytest.mark.parametrize("is_first", [True, False])
async def test_invalid_request_ends_the_stream(is_first: bool) -> None:
    server, context = make_xds_server(Settings(), RecordedEvents()), FakeContext()
    if is_first:
        context.requests.get_nowait()
    context.requests.put_nowait(b"\xff")
    with suppress(grpc.aio.AbortError):
        await server._serve(SotwSubscription, None, cast(Any, context))
    assert context.aborted_with == [grpc.StatusCode.INVALID_ARGUMENT]
    assert [status.connected_since for status in server.statuses()] == ([] if is_first else [None])


async def test_failed_push_is_reported_once_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no resources")

    events, plan_stamp = RecordedEvents(), (1, 2)
    server = make_xds_server(Settings(), events)
    monkeypatch.setattr("controlplane.xds.server._MIN_RETRY_SECONDS", 1e-6)
    with monkeypatch.context() as broken:
        broken.setattr("controlplane.xds.server.SnapshotCache", fail)
        for _ in range(2):
            server.publish(Plan(), at_once=True, stamp=plan_stamp)
            assert not server.is_pushed
    assert server.stamp is None
    run = asyncio.create_task(server.run())
    async with asyncio.timeout(30):
        await server.statuses_changed.wait()
    run.cancel()
    assert server.is_pushed
    assert server.stamp == plan_stamp
    assert [kind for kind, _, _ in events.recorded] == ["xds.push_failed", "xds.push_recovered"]


async def test_burst_of_changes_is_pushed_later_together(monkeypatch: pytest.MonkeyPatch) -> None:
    server, context = make_xds_server(Settings(), RecordedEvents()), FakeContext()
    stream = asyncio.create_task(server._serve(SotwSubscription, None, cast(Any, context)))
    await server.statuses_changed.wait()
    server.publish(Plan())
    assert server.is_pushed  # the first change
    due_at = asyncio.get_running_loop().time() + 0.5
    monkeypatch.setattr("controlplane.xds.server.next_push_at", lambda *_: due_at)
    run = asyncio.create_task(server.run())
    for _ in range(2):
        server.configure(Settings())
        assert not server.is_pushed
    async with asyncio.timeout(30):
        while not server.is_pushed:
            server.statuses_changed.clear()
            await server.statuses_changed.wait()
    assert asyncio.get_running_loop().time() >= due_at
    for task in (run, stream):
        task.cancel()


@pytest.mark.parametrize(
    ("last_push", "first_change", "latest", "expected"),
    [
        (float("-inf"), 5.0, 5.0, 5.0),  # the very first change
        (4.0, 5.0, 5.0, 5.0),  # after a quiet period
        (5.0, 5.005, 5.005, 5.025),
        (5.0, 5.005, 5.020, 5.040),
        (5.0, 5.005, 5.200, 5.205),  # an endless burst
    ],
)
def test_next_push_at(last_push: float, first_change: float, latest: float, expected: float) -> None:
    assert next_push_at(last_push, first_change, latest) == pytest.approx(expected)


@given(st.lists(st.floats(min_value=0, max_value=0.3), min_size=1, max_size=200))
def test_no_change_waits_longer_than_max_delay(gaps: list[float]) -> None:
    now, last_push, first_change, at = 0.0, float("-inf"), None, float("inf")
    for gap in gaps:
        now += gap
        if first_change is not None and at <= now:
            assert at - first_change <= MAX_DELAY_SECONDS + 1e-9
            assert at - last_push >= QUIET_SECONDS - 1e-9
            last_push, first_change = at, None
        first_change = now if first_change is None else first_change
        at = next_push_at(last_push, first_change, now)

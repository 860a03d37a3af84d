"""Following the keys under a prefix: listings, watches, and what happens when a listing or a watch fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from controlplane.errors import Compacted, PdError
from controlplane.etcd import prefix_watcher, rpc_pb2
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.endpoints import EtcdEndpoints
from controlplane.etcd.prefix_watcher import PrefixUpdate, watch_prefix
from controlplane.etcd.stream import Rejected
from controlplane.etcd.types import Entry, KeyChange, RangeResult, WatchBatch
from controlplane.etcd.watch import watch

LISTING = RangeResult({"/a/1": Entry(b"one", 5)}, 7)
READY = WatchBatch(7)
CHANGE = WatchBatch(9, (KeyChange("/a/2", b"two"),))
LOST = PdError("the watch was lost")


class FakeClient:
    """Answers each call with the next of the given results. If the last result is a watch, it stays open."""

    def __init__(self, *results: RangeResult | PdError | list[WatchBatch | PdError]) -> None:
        self._results = list(results)
        self.calls: list[str] = []

    async def range(self, prefix: str) -> RangeResult:
        self.calls.append("list")
        result = self._results.pop(0)
        if isinstance(result, PdError):
            raise result
        assert isinstance(result, RangeResult)
        return result

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        self.calls.append(f"watch from {start_revision}")
        result = self._results.pop(0)
        assert isinstance(result, list)
        for step in result:
            if isinstance(step, PdError):
                raise step
            yield step
        if not self._results:
            await asyncio.Event().wait()


async def first_updates(client: FakeClient, count: int, known: int | None = None) -> list[PrefixUpdate]:
    async with aclosing(watch_prefix(cast(EtcdClient, client), "/a/", known)) as updates, asyncio.timeout(5):
        return [await anext(updates) for _ in range(count)]


async def test_lists_once_and_continues_after_a_lost_watch_at_the_next_revision() -> None:
    client = FakeClient(LISTING, [READY, CHANGE, LOST], [WatchBatch(9)])
    assert await first_updates(client, 4) == [LISTING, READY, CHANGE, WatchBatch(9)]
    assert client.calls == ["list", "watch from 8", "watch from 10"]


async def test_known_keys_are_not_listed() -> None:
    client = FakeClient([READY])
    assert await first_updates(client, 1, known=7) == [READY]
    assert client.calls == ["watch from 8"]


async def test_second_failure_in_a_row_and_failure_without_any_listing_are_outages() -> None:
    client = FakeClient(LISTING, [LOST], [LOST], [READY])
    assert await first_updates(client, 3) == [LISTING, LOST, READY]
    client = FakeClient(LOST, LISTING, [READY])
    assert await first_updates(client, 3) == [LOST, LISTING, READY]


async def test_compacted_changes_are_listed_again_without_an_outage() -> None:
    client = FakeClient(LISTING, [Compacted("compacted")], LISTING, [READY])
    assert await first_updates(client, 3) == [LISTING, LISTING, READY]


async def test_watch_that_ends_without_an_error_is_listed_again() -> None:
    client = FakeClient(LISTING, [READY, CHANGE], LISTING, [READY])
    assert await first_updates(client, 5) == [LISTING, READY, CHANGE, LISTING, READY]
    assert client.calls == ["list", "watch from 8", "list", "watch from 8"]


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED])
async def test_denied_access_is_not_retryable_but_tried_again_slowly(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = Rejected("http://pd:2379", code, "no")
    assert not denied.retryable
    client = FakeClient(denied, LISTING, [READY])
    async with aclosing(watch_prefix(cast(EtcdClient, client), "/a/")) as updates:
        outage = await anext(updates)
        assert "give the client of pd.tls access to /a/: Tidevoy tries again every 30 s" in str(outage)
        monkeypatch.setattr(prefix_watcher, "DENIED_RETRY_SECONDS", 0.3)
        next_update = asyncio.ensure_future(anext(updates))
        await asyncio.wait({next_update}, timeout=0.05)
        assert not next_update.done()
        assert await next_update == LISTING


async def test_cancelled_watch_without_permission_is_not_retryable() -> None:
    class DeniedStream:
        url = "http://pd:2379"

        async def send(self, *_: object) -> None:
            pass

        async def receive(self, *_: object) -> object:
            reason = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
            return rpc_pb2.WatchResponse(created=True, canceled=True, cancel_reason=reason)

        async def close(self) -> None:
            pass

    endpoints = SimpleNamespace(open_stream=lambda _: DeniedStream(), check_cluster_id=lambda _: None)
    with pytest.raises(Rejected, match="permission denied") as denied:
        await anext(watch(cast(EtcdEndpoints, endpoints), "/a/", 1))
    assert not denied.value.retryable

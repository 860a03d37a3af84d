"""DNS resolution: when names are looked up, which address is chosen, and what happens on failures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from controlplane.model.intents import Intents
from controlplane.model.nodes import Resolution
from controlplane.observe.discovery.dns import Lookup, Resolver, choose_address, system_lookup
from controlplane.storage.file_store import FileStore
from tests.support.waiting import wait_until


class FakeDns:
    """A lookup function that blocks while `release` is cleared.

    It returns the host's entry in `answers`. If the entry is an exception, it raises the exception.
    """

    def __init__(self, **answers: Sequence[str] | Exception) -> None:
        self.answers = answers
        self.requested_hosts: list[str] = []
        self.running = 0
        self.max_running = 0
        self.release = threading.Event()
        self.release.set()
        self._lock = threading.Lock()

    def __call__(self, host: str) -> Sequence[str]:
        with self._lock:
            self.requested_hosts.append(host)
            self.running += 1
            self.max_running = max(self.max_running, self.running)
        self.release.wait()
        with self._lock:
            self.running -= 1
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.asynccontextmanager
async def resolving(
    lookup: Lookup, interval: float = 0.02
) -> AsyncIterator[tuple[Resolver, asyncio.Queue[Resolution]]]:
    published: asyncio.Queue[Resolution] = asyncio.Queue()
    resolver = Resolver(published.put_nowait, lookup=lookup, interval=interval)
    run_task = asyncio.create_task(resolver.run())
    try:
        yield resolver, published
    finally:
        run_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run_task


async def next_resolution(published: asyncio.Queue[Resolution]) -> Resolution:
    return await asyncio.wait_for(published.get(), 5)


@pytest.mark.parametrize(
    ("answers", "current", "expected"),
    [
        (["10.0.0.2"], None, "10.0.0.2"),
        (["10.0.0.10", "10.0.0.9"], None, "10.0.0.9"),  # numeric, not alphabetic order
        (["fd00::1", "10.0.0.9"], None, "10.0.0.9"),
        (["fd00::2", "fd00::1"], None, "fd00::1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.2", "10.0.0.2"),
        (["10.0.0.1", "fd00:0:0::2"], "fd00::2", "fd00::2"),
        (["10.0.0.3", "10.0.0.4"], "10.0.0.2", "10.0.0.3"),
        (["fe80::1%eth0"], None, None),
        ([], "10.0.0.2", None),
    ],
)
def test_current_or_lowest_address_is_chosen(
    answers: list[str], current: str | None, expected: str | None
) -> None:
    assert choose_address(answers, current) == expected


async def test_new_name_is_looked_up_at_once() -> None:
    dns = FakeDns(a=["10.0.0.1"], b=["10.0.0.2"])
    async with resolving(dns, interval=3600) as (resolver, published):
        resolver.set_hosts(["a"])
        assert await next_resolution(published) == Resolution("a", "10.0.0.1")
        resolver.set_hosts(["a", "b"])
        assert await next_resolution(published) == Resolution("b", "10.0.0.2")
    assert dns.requested_hosts == ["a", "b"]


async def test_only_changed_resolutions_are_published() -> None:
    dns = FakeDns(a=["10.0.0.1", "10.0.0.2"])
    async with resolving(dns) as (resolver, published):
        resolver.set_hosts(["a"])
        assert (await next_resolution(published)).ip == "10.0.0.1"
        dns.answers["a"] = ["10.0.0.0", "10.0.0.1"]
        lookups = len(dns.requested_hosts)
        await wait_until(lambda: len(dns.requested_hosts) >= lookups + 3)
        assert published.empty()
        dns.answers["a"] = ["10.0.0.7"]
        assert await next_resolution(published) == Resolution("a", "10.0.0.7")


async def test_failed_lookup_keeps_the_last_address_with_a_reason() -> None:
    dns = FakeDns(a=["10.0.0.1"])
    async with resolving(dns) as (resolver, published):
        resolver.set_hosts(["a"])
        await next_resolution(published)
        dns.answers["a"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        failed = await next_resolution(published)
        assert failed == Resolution(
            "a",
            "10.0.0.1",
            "the name a cannot be resolved (Temporary failure in name resolution); "
            "its last address 10.0.0.1 stays in use",
        )
        dns.answers["a"] = []
        assert "contains no address that Envoys can use" in (await next_resolution(published)).reason
        dns.answers["a"] = ["10.0.0.1"]
        assert await next_resolution(published) == Resolution("a", "10.0.0.1")


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (UnicodeError("label too long"), "it is not a valid host name"),
        (TimeoutError("no answer"), "no answer"),
    ],
)
async def test_never_resolved_name_has_no_address(failure: Exception, problem: str) -> None:
    async with resolving(FakeDns(a=failure)) as (resolver, published):
        resolver.set_hosts(["a"])
        resolution = await next_resolution(published)
    assert resolution.ip is None
    assert resolution.reason == f"the name a cannot be resolved ({problem}); correct the name or DNS"


async def test_removed_name_is_not_looked_up_again() -> None:
    dns = FakeDns(a=["10.0.0.1"], b=["10.0.0.2"])
    async with resolving(dns) as (resolver, published):
        resolver.set_hosts(["a", "b"])
        await next_resolution(published)
        await next_resolution(published)
        resolver.set_hosts(["b"])
        dns.requested_hosts.clear()
        await wait_until(lambda: len(dns.requested_hosts) >= 3)
    assert set(dns.requested_hosts) == {"b"}


async def test_parallel_lookups_are_limited() -> None:
    hosts = {f"h{i}": [f"10.0.0.{i}"] for i in range(30)}
    dns = FakeDns(**hosts)
    dns.release.clear()
    async with resolving(dns, interval=3600) as (resolver, published):
        resolver.set_hosts(hosts)
        await wait_until(lambda: dns.running == 4)
        dns.release.set()
        resolved = {(await next_resolution(published)).host for _ in hosts}
    assert resolved == set(hosts)
    assert dns.max_running == 4


async def test_hanging_lookups_do_not_delay_saving_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names keep changing, and each cancelled lookup that hangs still occupies its thread."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait() and [])
    store = FileStore(tmp_path)
    try:
        async with store.lock(), resolving(system_lookup) as (resolver, _):
            for generation in range(50):
                resolver.set_hosts([f"h{generation}-{number}" for number in range(4)])
                for _ in range(3):
                    await asyncio.sleep(0)
            save = asyncio.create_task(store.save_intents(Intents(weights={"a:1": 5}), 0))
            is_saved = bool((await asyncio.wait({save}, timeout=5))[0])
            release.set()
            await save
        assert is_saved
    finally:
        release.set()


async def test_names_set_before_the_start_are_looked_up() -> None:
    published: asyncio.Queue[Resolution] = asyncio.Queue()
    resolver = Resolver(published.put_nowait, lookup=FakeDns(a=["10.0.0.1"]))
    resolver.set_hosts(["a"])
    run_task = asyncio.create_task(resolver.run())
    assert (await next_resolution(published)).ip == "10.0.0.1"
    run_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run_task


async def test_system_resolver_resolves_localhost_but_no_invalid_name() -> None:
    published: asyncio.Queue[Resolution] = asyncio.Queue()
    resolver = Resolver(published.put_nowait)
    run_task = asyncio.create_task(resolver.run())
    try:
        resolver.set_hosts(["localhost"])
        assert await next_resolution(published) == Resolution("localhost", "127.0.0.1")
        resolver.set_hosts(["a" * 64 + ".invalid"])
        assert (await next_resolution(published)).ip is None
    finally:
        run_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run_task

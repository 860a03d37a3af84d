"""Host names to addresses: when names are looked up, which answer is taken, and what a failure does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from controlplane.model.nodes import Resolution
from controlplane.observe.discovery.dns import Lookup, Resolver, choose_address
from tests.support.waiting import wait_until


class Names:
    """A name service whose answers the test sets; an exception as answer is raised."""

    def __init__(self, **answers: Sequence[str] | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.busy = 0
        self.busiest = 0
        self.hold: asyncio.Event | None = None

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.busy -= 1
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
    running = asyncio.create_task(resolver.run())
    try:
        yield resolver, published
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def soon(published: asyncio.Queue[Resolution]) -> Resolution:
    return await asyncio.wait_for(published.get(), 5)


@pytest.mark.parametrize(
    ("answers", "current", "chosen"),
    [
        (["10.0.0.2"], None, "10.0.0.2"),
        (["10.0.0.10", "10.0.0.9"], None, "10.0.0.9"),  # by number, not by letters
        (["fd00::1", "10.0.0.9"], None, "10.0.0.9"),
        (["fd00::2", "fd00::1"], None, "fd00::1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.2", "10.0.0.2"),
        (["10.0.0.1", "fd00:0:0::2"], "fd00::2", "fd00::2"),
        (["10.0.0.3", "10.0.0.4"], "10.0.0.2", "10.0.0.3"),
        (["fe80::1%eth0"], None, None),
        ([], "10.0.0.2", None),
    ],
)
def test_choice(answers: list[str], current: str | None, chosen: str | None) -> None:
    assert choose_address(answers, current) == chosen


async def test_a_new_name_is_looked_up_at_once() -> None:
    names = Names(a=["10.0.0.1"], b=["10.0.0.2"])
    async with resolving(names, interval=3600) as (resolver, published):
        resolver.set_hosts(["a"])
        assert await soon(published) == Resolution("a", "10.0.0.1")
        resolver.set_hosts(["a", "b"])
        assert await soon(published) == Resolution("b", "10.0.0.2")
    assert names.asked == ["a", "b"]


async def test_a_change_is_published_and_no_change_is_not() -> None:
    names = Names(a=["10.0.0.1", "10.0.0.2"])
    async with resolving(names) as (resolver, published):
        resolver.set_hosts(["a"])
        assert (await soon(published)).ip == "10.0.0.1"
        names.answers["a"] = ["10.0.0.0", "10.0.0.1"]
        asked = len(names.asked)
        await wait_until(lambda: len(names.asked) >= asked + 3)
        assert published.empty()
        names.answers["a"] = ["10.0.0.7"]
        assert await soon(published) == Resolution("a", "10.0.0.7")


async def test_a_failing_lookup_keeps_the_last_address_and_says_why() -> None:
    names = Names(a=["10.0.0.1"])
    async with resolving(names) as (resolver, published):
        resolver.set_hosts(["a"])
        await soon(published)
        names.answers["a"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        failed = await soon(published)
        assert failed == Resolution(
            "a",
            "10.0.0.1",
            "the name a cannot be resolved (Temporary failure in name resolution); "
            "its last address 10.0.0.1 stays in use",
        )
        names.answers["a"] = []
        assert "holds no address that Envoys could use" in (await soon(published)).reason
        names.answers["a"] = ["10.0.0.1"]
        assert await soon(published) == Resolution("a", "10.0.0.1")


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (UnicodeError("label too long"), "it is no valid host name"),
        (TimeoutError("no answer"), "no answer"),
    ],
)
async def test_a_name_that_never_resolved_has_no_address(failure: Exception, told: str) -> None:
    async with resolving(Names(a=failure)) as (resolver, published):
        resolver.set_hosts(["a"])
        resolution = await soon(published)
    assert resolution.ip is None
    assert resolution.reason == f"the name a cannot be resolved ({told}); correct the name or DNS"


async def test_a_vanished_name_is_not_looked_up_any_more() -> None:
    names = Names(a=["10.0.0.1"], b=["10.0.0.2"])
    async with resolving(names) as (resolver, published):
        resolver.set_hosts(["a", "b"])
        await soon(published)
        await soon(published)
        resolver.set_hosts(["b"])
        names.asked.clear()
        await wait_until(lambda: len(names.asked) >= 3)
    assert set(names.asked) == {"b"}


async def test_few_lookups_run_at_a_time_and_each_name_gets_its_turn() -> None:
    hosts = {f"h{i}": [f"10.0.0.{i}"] for i in range(30)}
    names = Names(**hosts)
    names.hold = asyncio.Event()
    async with resolving(names, interval=3600) as (resolver, published):
        resolver.set_hosts(hosts)
        await wait_until(lambda: names.busy == 4)
        names.hold.set()
        resolved = {(await soon(published)).host for _ in hosts}
    assert resolved == set(hosts)
    assert names.busiest == 4


async def test_names_given_before_the_start_are_looked_up_when_it_starts() -> None:
    published: asyncio.Queue[Resolution] = asyncio.Queue()
    resolver = Resolver(published.put_nowait, lookup=Names(a=["10.0.0.1"]))
    resolver.set_hosts(["a"])
    running = asyncio.create_task(resolver.run())
    assert (await soon(published)).ip == "10.0.0.1"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_real_resolver_knows_localhost_and_not_what_cannot_exist() -> None:
    published: asyncio.Queue[Resolution] = asyncio.Queue()
    resolver = Resolver(published.put_nowait)
    running = asyncio.create_task(resolver.run())
    try:
        resolver.set_hosts(["localhost"])
        assert await soon(published) == Resolution("localhost", "127.0.0.1")
        resolver.set_hosts(["a" * 64 + ".invalid"])
        assert (await soon(published)).ip is None
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

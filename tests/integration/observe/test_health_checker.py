"""The checker of all nodes: when it probes, what it publishes, and that no node disturbs another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import pytest

from controlplane.config.settings import HealthChecks, SqlCheck, StatusCheck
from controlplane.model.health import Health, Outcome
from controlplane.observe.health.health_checker import HealthChecker, Target
from tests.support.fake_servers import (
    GREETING,
    LACKING,
    STATUS,
    Peer,
    StatusPort,
    answers,
    full_backlog,
    http,
    listening,
    packet,
    sends,
)


class Published:
    """What a checker publishes: all of it in order, and a way to wait for what is to come."""

    def __init__(self) -> None:
        self.all: list[tuple[float, str, Health]] = []
        self._more = asyncio.Event()

    def __call__(self, address: str, health: Health) -> None:
        self.all.append((time.monotonic(), address, health))
        self._more.set()

    def of(self, address: str) -> list[Health]:
        return [health for _, a, health in self.all if a == address]

    @property
    def latest(self) -> Health:
        return self.all[-1][2]

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._more.clear()
                await self._more.wait()

    async def both(self, address: str) -> Health:
        """The first health of a node that both checks have contributed to."""

        def complete() -> bool:
            return any(h.status is not None and h.sql is not None for h in self.of(address))

        await self.until(complete)
        return next(h for h in self.of(address) if h.status is not None and h.sql is not None)


def checks(
    interval: float = 0.1, timeout: float = 0.5, *, status: bool = True, sql: bool = True
) -> HealthChecks:
    return HealthChecks(
        status=StatusCheck(interval=interval, timeout=timeout, enabled=status),
        sql=SqlCheck(interval=interval, timeout=timeout, enabled=sql),
    )


@contextlib.asynccontextmanager
async def checking(settings: HealthChecks) -> AsyncIterator[tuple[HealthChecker, Published]]:
    published = Published()
    checker = HealthChecker(settings, published, time.monotonic)
    running = asyncio.create_task(checker.run())
    await asyncio.sleep(0)
    try:
        yield checker, published
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def target(address: str, sql: str, status: str | None = None) -> dict[str, Target]:
    return {address: Target(address=address, sql=sql, status=status, status_host="127.0.0.1")}


async def test_a_new_node_is_probed_at_once_by_both_checks() -> None:
    async with (
        listening(answers(http(200, STATUS))) as status,
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=60)) as (checker, published),
    ):
        delays = []
        for i in range(11):
            began = time.monotonic()
            checker.watch(target(f"n{i}:4000", sql.endpoint, status.endpoint))
            health = await published.both(f"n{i}:4000")
            delays.append(time.monotonic() - began)
    assert health.status is not None
    assert health.sql is not None
    assert (health.status.outcome, health.sql.outcome) == (Outcome.PASS, Outcome.PASS)
    assert (health.connections, health.version) == (3, "8.0.11-TiDB-v8.5.3")
    assert statistics.median(delays) < 0.05  # a few ms; the machine may be busy


async def test_targets_given_before_the_start_are_probed_when_it_starts() -> None:
    async with listening(sends(packet(GREETING))) as sql:
        published = Published()
        checker = HealthChecker(checks(), published, time.monotonic)
        checker.watch(target("a:4000", sql.endpoint))
        running = asyncio.create_task(checker.run())
        await published.until(lambda: bool(published.all))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_every_probe_is_published_and_streaks_grow() -> None:
    async with (
        listening(answers(http(500, b""))) as status,
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint, status.endpoint))
        await published.until(lambda: len(published.of("a:4000")) >= 10)
        latest = published.of("a:4000")[-1]
        assert status.connections == 1
    assert latest.status is not None
    assert latest.sql is not None
    assert latest.status.outcome is Outcome.STOPPING
    assert latest.status.streak + latest.sql.streak == len(published.of("a:4000"))


async def test_a_vanished_node_is_neither_probed_nor_published_any_more() -> None:
    async with (
        listening(answers(http(200, STATUS))) as status,
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        both = target("a:4000", sql.endpoint, status.endpoint) | target("b:4000", sql.endpoint)
        checker.watch(both)
        await published.both("a:4000")
        checker.watch({"b:4000": both["b:4000"]})
        before = len(published.of("a:4000"))
        await asyncio.wait_for(status.ended.get(), 5)
        more = len(published.of("b:4000")) + 5
        await published.until(lambda: len(published.of("b:4000")) >= more)
    assert len(published.of("a:4000")) == before


async def test_a_node_with_a_new_ip_is_probed_at_once_and_its_streak_starts_again() -> None:
    async with (
        listening(sends(packet(GREETING))) as old,
        listening(sends(packet(GREETING))) as new,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        checker.watch(target("a:4000", old.endpoint))
        await published.until(lambda: len(published.all) >= 4)
        seen = len(published.all)
        checker.watch(target("a:4000", new.endpoint))
        await published.until(lambda: len(published.all) > seen)
    first = published.all[seen][2].sql
    assert first is not None
    assert first.streak == 1
    assert new.endpoint in first.reason


async def test_an_unchanged_set_of_targets_disturbs_nothing() -> None:
    async with (
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=60)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint))
        await published.until(lambda: len(published.all) == 1)
        checker.watch(target("a:4000", sql.endpoint))
        checker.watch(target("a:4000", sql.endpoint) | target("b:4000", sql.endpoint))
        await published.until(lambda: bool(published.of("b:4000")))
    assert len(published.of("a:4000")) == 1


async def test_new_settings_apply_to_running_checks() -> None:
    async with (
        listening(answers(http(200, STATUS))) as status,
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=300)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint, status.endpoint))
        await published.both("a:4000")
        checker.configure(checks(interval=0.05), proxy_protocol=False)
        await published.until(lambda: len(published.all) >= 8)
        latest = published.of("a:4000")[-1]
        assert latest.sql is not None
        assert latest.sql.streak > 1  # what was known is kept

        checker.configure(checks(interval=0.05, status=False), proxy_protocol=False)
        latest = published.of("a:4000")[-1]
        assert (latest.status, latest.connections, latest.connections_at) == (None, None, None)
        assert latest.sql is not None
        await asyncio.wait_for(status.ended.get(), 5)

        checker.configure(checks(interval=0.05), proxy_protocol=False)
        await published.until(lambda: published.of("a:4000")[-1].status is not None)


async def test_proxy_protocol_can_be_switched_on_while_it_runs() -> None:
    async def demanding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(16)
        writer.write(packet(GREETING))

    async with (
        listening(demanding) as sql,
        checking(checks(interval=0.05, timeout=0.1)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint))
        await published.until(lambda: bool(published.all))
        assert published.all[-1][2].sql.outcome is Outcome.FAIL  # type: ignore[union-attr]
        checker.configure(checks(interval=0.05, timeout=0.1), proxy_protocol=True)
        await published.until(lambda: published.all[-1][2].sql.outcome is Outcome.PASS)  # type: ignore[union-attr]


async def test_a_check_that_is_off_is_never_made() -> None:
    async with (
        listening(answers(http(200, STATUS))) as status,
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=0.05, sql=False)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint, status.endpoint))
        await published.until(lambda: len(published.all) >= 3)
        assert sql.connections == 0
    assert all(health.sql is None for health in published.of("a:4000"))


async def test_a_stall_of_the_loop_is_not_followed_by_a_burst() -> None:
    async with (
        listening(sends(packet(GREETING))) as sql,
        checking(checks(interval=0.1)) as (checker, published),
    ):
        checker.watch(target("a:4000", sql.endpoint))
        await published.until(lambda: len(published.all) >= 3)
        time.sleep(1.0)  # noqa: ASYNC251 - the stall
        seen = len(published.all)
        began = time.monotonic()
        await published.until(lambda: len(published.all) >= seen + 5)
        took = time.monotonic() - began
    assert took > 0.3
    assert published.all[-1][2].sql.outcome is Outcome.PASS  # type: ignore[union-attr]


async def test_a_stall_during_a_probe_is_not_blamed_on_the_node() -> None:
    asked = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.sleep(0.02)
        writer.write(packet(GREETING))

    async with listening(slow) as sql, checking(checks(interval=0.1, timeout=0.3)) as (checker, published):
        checker.watch(target("a:4000", sql.endpoint))
        await asked.wait()
        time.sleep(1.0)  # noqa: ASYNC251 - the stall
        await published.until(lambda: len(published.all) >= 3)
    assert {health.sql.outcome for health in published.of("a:4000") if health.sql} == {Outcome.PASS}


async def test_cancelling_closes_every_connection() -> None:
    async with listening(answers(http(200, STATUS))) as status, listening(sends()) as sql:
        async with checking(checks(interval=0.1, timeout=30)) as (checker, published):
            for i in range(20):
                checker.watch(
                    {
                        f"n{k}:4000": Target(f"n{k}:4000", sql.endpoint, status.endpoint, "127.0.0.1")
                        for k in range(i + 1)
                    }
                )
            await published.until(lambda: len({a for _, a, _ in published.all}) == 20)
        for peer in (status, sql):
            for _ in range(20):
                await asyncio.wait_for(peer.ended.get(), 5)


async def test_black_holes_do_not_delay_the_others() -> None:
    """Nodes that answer are probed again and again before the first probe of a black hole ends."""
    interval, hang, good, probes_each = 1.0, 60.0, 80, 5
    async with (
        listening(answers(http(200, STATUS))) as status,
        listening(sends(packet(GREETING))) as sql,
        listening(sends()) as mute,
    ):
        with full_backlog() as hole:
            targets: dict[str, Target] = {}
            for i in range(good):
                targets |= target(f"good{i}:4000", sql.endpoint, status.endpoint)
                targets |= target(f"hole{i}:4000", hole if i % 2 else mute.endpoint, hole)
            async with checking(checks(interval=interval, timeout=hang)) as (checker, published):

                def are_probed() -> bool:
                    latest = {address: health for _, address, health in published.all}
                    return len(latest) == good and all(
                        each.status is not None
                        and each.sql is not None
                        and min(each.status.streak, each.sql.streak) >= probes_each
                        for each in latest.values()
                    )

                checker.watch(targets)
                await published.until(are_probed, hang / 2)
    assert {address.rstrip("0123456789:")[:4] for _, address, _ in published.all} == {"good"}
    for kind in ("status", "sql"):
        probes: dict[str, set[float]] = defaultdict(set)
        for _, address, health in published.all:
            if (probe := getattr(health, kind)) is not None:
                assert probe.outcome is Outcome.PASS
                probes[address].add(probe.at)
        moments = [sorted(times) for times in probes.values()]
        assert [len(times) >= probes_each for times in moments] == [True] * good
        # The second probe comes early by its random phase; from then on the period holds.
        periods = [b - a for times in moments for a, b in itertools.pairwise(times[1:])]
        assert abs(statistics.median(periods) - interval) < 0.1
        # The nodes are spread over the interval: no fifth of it holds half of them.
        fifths = [int((times[1] % interval) / interval * 5) for times in moments]
        assert max(fifths.count(fifth) for fifth in range(5)) < good / 2


@contextlib.asynccontextmanager
async def lacking() -> AsyncIterator[tuple[StatusPort, Peer, HealthChecker, Published]]:
    """A node without what its sessions need to move, and a checker that has found out."""
    port = StatusPort()
    async with listening(port) as status, checking(checks(sql=False)) as (checker, published):
        checker.watch(target("a:1", "127.0.0.1:1", status.endpoint))
        await published.until(lambda: bool(published.all) and bool(published.latest.hindrances))
        yield port, status, checker, published


COMPLETE = LACKING.replace(b'""', b'"/tidb/session.crt"')


async def test_a_nodes_configuration_is_read_once_each_time_that_it_starts() -> None:
    async with lacking() as (port, status, _, published):
        assert published.latest.hindrances[0].startswith("its sessions cannot move")
        await published.until(lambda: port.asked.count("/status") >= 5)
        assert (port.asked[:2], port.asked.count("/config")) == (["/status", "/config"], 1)
        port.status, port.config = http(500, b""), http(200, COMPLETE)
        await published.until(lambda: published.latest.status.outcome is Outcome.STOPPING)  # type: ignore[union-attr]
        assert published.latest.hindrances
        port.status = http(200, STATUS)
        await published.until(lambda: not published.latest.hindrances)
        assert port.asked.count("/config") == 2
        assert status.connections == 1


async def test_what_a_node_lacks_is_told_again_when_its_check_is_switched_on_again() -> None:
    async with lacking() as (_, _, checker, published):
        checker.configure(checks(sql=False, status=False), proxy_protocol=False)
        assert not published.latest.hindrances
        checker.configure(checks(sql=False), proxy_protocol=False)
        await published.until(lambda: bool(published.latest.hindrances))


async def test_what_a_node_lacks_stands_while_its_configuration_cannot_be_read() -> None:
    async with lacking() as (port, _, _, published):
        port.status, port.config = http(500, b""), http(404, b"no")
        await published.until(lambda: published.latest.status.outcome is Outcome.STOPPING)  # type: ignore[union-attr]
        port.status = http(200, STATUS)
        await published.until(lambda: published.latest.status.outcome is Outcome.PASS)  # type: ignore[union-attr]
        asked = len(port.asked)
        await published.until(lambda: len(port.asked) >= asked + 3)
        assert port.asked.count("/config") == 2
        assert published.latest.hindrances


@pytest.mark.parametrize("config", [http(404, b"no"), http(200, STATUS), b""])
async def test_a_configuration_that_cannot_be_read_says_nothing_and_does_not_disturb(config: bytes) -> None:
    port = StatusPort()
    port.config = config
    async with (
        listening(port) as status,
        checking(checks(sql=False, timeout=0.1)) as (checker, published),
    ):
        checker.watch(target("a:1", "127.0.0.1:1", status.endpoint))
        await published.until(lambda: port.asked.count("/status") >= 5)
        assert port.asked.count("/config") == 1
        seen = published.of("a:1")
        assert {health.hindrances for health in seen} == {()}
        assert {health.status.outcome for health in seen if health.status} == {Outcome.PASS}

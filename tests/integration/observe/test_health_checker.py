"""The health checker: when it probes, what it publishes, and that nodes do not affect each other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from controlplane.config.settings import HealthCheckSettings, SqlCheckSettings, StatusCheckSettings
from controlplane.model.health import CheckStatus, Health
from controlplane.observe.health.health_checker import CheckTarget, HealthChecker
from tests.support.fake_servers import (
    CONFIG_WITHOUT_MIGRATION,
    GREETING_PAYLOAD,
    STATUS_BODY,
    FakeServer,
    FakeStatusPort,
    answer_http,
    full_backlog,
    http_response,
    mysql_packet,
    run_fake_server,
    send_parts,
)
from tests.support.waiting import wait_until


class PublishedHealth:
    """Records what a checker publishes, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[float, str, Health]] = []

    def __call__(self, address: str, health: Health) -> None:
        self.all.append((time.monotonic(), address, health))

    def healths_of(self, address: str) -> list[Health]:
        return [health for _, a, health in self.all if a == address]

    @property
    def latest(self) -> Health:
        return self.all[-1][2]

    async def wait_for_both_results(self, address: str) -> Health:
        """Wait for the first health of a node with results of both checks, and return it."""

        def complete() -> bool:
            return any(h.status is not None and h.sql is not None for h in self.healths_of(address))

        await wait_until(complete)
        return next(h for h in self.healths_of(address) if h.status is not None and h.sql is not None)


def checks(
    interval: float = 0.1, timeout: float = 0.5, *, status: bool = True, sql: bool = True
) -> HealthCheckSettings:
    return HealthCheckSettings(
        status=StatusCheckSettings(interval=interval, timeout=timeout, enabled=status),
        sql=SqlCheckSettings(interval=interval, timeout=timeout, enabled=sql),
    )


@contextlib.asynccontextmanager
async def checking(settings: HealthCheckSettings) -> AsyncIterator[tuple[HealthChecker, PublishedHealth]]:
    published = PublishedHealth()
    checker = HealthChecker(settings, published, time.monotonic)
    run_task = asyncio.create_task(checker.run())
    await asyncio.sleep(0)
    try:
        yield checker, published
    finally:
        run_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run_task


def target(address: str, sql: str, status: str | None = None) -> dict[str, CheckTarget]:
    return {
        address: CheckTarget(
            address=address, sql_endpoint=sql, status_endpoint=status, status_host="127.0.0.1"
        )
    }


async def test_new_node_is_probed_at_once_by_both_checks() -> None:
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=60)) as (checker, published),
    ):
        delays = []
        for i in range(11):
            started_at = time.monotonic()
            checker.set_targets(target(f"n{i}:4000", sql.endpoint, status.endpoint))
            health = await published.wait_for_both_results(f"n{i}:4000")
            delays.append(time.monotonic() - started_at)
    assert health.status is not None
    assert health.sql is not None
    assert (health.status.status, health.sql.status) == (CheckStatus.PASS, CheckStatus.PASS)
    assert (health.connections, health.version) == (3, "8.0.11-TiDB-v8.5.3")
    assert statistics.median(delays) < 0.5  # normally a few ms, more on a busy machine


async def test_targets_set_before_the_start_are_probed() -> None:
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql:
        published = PublishedHealth()
        checker = HealthChecker(checks(), published, time.monotonic)
        checker.set_targets(target("a:4000", sql.endpoint))
        run_task = asyncio.create_task(checker.run())
        await wait_until(lambda: bool(published.all))
        run_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_task


async def test_every_probe_is_published_with_its_consecutive_count() -> None:
    async with (
        run_fake_server(answer_http(http_response(500, b""))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint, status.endpoint))
        await wait_until(lambda: len(published.healths_of("a:4000")) >= 10)
        latest = published.healths_of("a:4000")[-1]
        assert status.connections == 1
    assert latest.status is not None
    assert latest.sql is not None
    assert latest.status.status is CheckStatus.STOPPING
    assert latest.status.consecutive + latest.sql.consecutive == len(published.healths_of("a:4000"))


async def test_removed_node_is_neither_probed_nor_published() -> None:
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        both = target("a:4000", sql.endpoint, status.endpoint) | target("b:4000", sql.endpoint)
        checker.set_targets(both)
        await published.wait_for_both_results("a:4000")
        checker.set_targets({"b:4000": both["b:4000"]})
        before = len(published.healths_of("a:4000"))
        await asyncio.wait_for(status.connection_ends.get(), 5)
        target_count = len(published.healths_of("b:4000")) + 5
        await wait_until(lambda: len(published.healths_of("b:4000")) >= target_count)
    assert len(published.healths_of("a:4000")) == before


async def test_node_with_a_new_ip_is_probed_at_once_as_a_new_one() -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as old,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as new,
        checking(checks(interval=0.05)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", old.endpoint))
        await wait_until(lambda: len(published.all) >= 4)
        published_count = len(published.all)
        checker.set_targets(target("a:4000", new.endpoint))
        await wait_until(lambda: len(published.all) > published_count)
    first = published.all[published_count][2].sql
    assert first is not None
    assert first.consecutive == 1
    assert new.endpoint in first.reason


async def test_unchanged_targets_do_not_restart_checks() -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=60)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint))
        await wait_until(lambda: len(published.all) == 1)
        checker.set_targets(target("a:4000", sql.endpoint))
        checker.set_targets(target("a:4000", sql.endpoint) | target("b:4000", sql.endpoint))
        await wait_until(lambda: bool(published.healths_of("b:4000")))
    assert len(published.healths_of("a:4000")) == 1


async def test_new_settings_apply_to_running_checks() -> None:
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=300)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint, status.endpoint))
        await published.wait_for_both_results("a:4000")
        checker.configure(checks(interval=0.05), proxy_protocol=False)
        await wait_until(lambda: len(published.all) >= 8)
        latest = published.healths_of("a:4000")[-1]
        assert latest.sql is not None
        assert latest.sql.consecutive > 1  # earlier results are kept

        checker.configure(checks(interval=0.05, status=False), proxy_protocol=False)
        latest = published.healths_of("a:4000")[-1]
        assert (latest.status, latest.connections, latest.connections_at) == (None, None, None)
        assert latest.sql is not None
        await asyncio.wait_for(status.connection_ends.get(), 5)

        checker.configure(checks(interval=0.05), proxy_protocol=False)
        await wait_until(lambda: published.healths_of("a:4000")[-1].status is not None)


async def test_proxy_protocol_can_be_enabled_at_run_time() -> None:
    async def greet_after_proxy_header(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(16)
        writer.write(mysql_packet(GREETING_PAYLOAD))

    async with (
        run_fake_server(greet_after_proxy_header) as sql,
        checking(checks(interval=0.05, timeout=0.1)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint))
        await wait_until(lambda: bool(published.all))
        assert published.all[-1][2].sql.status is CheckStatus.FAIL  # type: ignore[union-attr]
        checker.configure(checks(interval=0.05, timeout=0.1), proxy_protocol=True)
        await wait_until(lambda: published.all[-1][2].sql.status is CheckStatus.PASS)  # type: ignore[union-attr]


async def test_disabled_check_never_runs() -> None:
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=0.05, sql=False)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint, status.endpoint))
        await wait_until(lambda: len(published.all) >= 3)
        assert sql.connections == 0
    assert all(health.sql is None for health in published.healths_of("a:4000"))


async def test_event_loop_stall_is_not_followed_by_a_burst() -> None:
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        checking(checks(interval=0.1)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint))
        await wait_until(lambda: len(published.all) >= 3)
        time.sleep(1.0)  # noqa: ASYNC251 - the stall
        published_count = len(published.all)
        started_at = time.monotonic()
        await wait_until(lambda: len(published.all) >= published_count + 5)
        elapsed = time.monotonic() - started_at
    assert elapsed > 0.3
    assert published.all[-1][2].sql.status is CheckStatus.PASS  # type: ignore[union-attr]


async def test_stall_during_a_probe_does_not_fail_the_node() -> None:
    connected = asyncio.Event()

    async def greet_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await asyncio.sleep(0.02)
        writer.write(mysql_packet(GREETING_PAYLOAD))

    async with (
        run_fake_server(greet_slowly) as sql,
        checking(checks(interval=0.1, timeout=0.3)) as (checker, published),
    ):
        checker.set_targets(target("a:4000", sql.endpoint))
        await connected.wait()
        time.sleep(1.0)  # noqa: ASYNC251 - the stall
        await wait_until(lambda: len(published.all) >= 3)
    assert {health.sql.status for health in published.healths_of("a:4000") if health.sql} == {
        CheckStatus.PASS
    }


async def test_cancellation_closes_all_connections() -> None:
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts()) as sql,
    ):
        async with checking(checks(interval=0.1, timeout=30)) as (checker, published):
            for i in range(20):
                checker.set_targets(
                    {
                        f"n{k}:4000": CheckTarget(f"n{k}:4000", sql.endpoint, status.endpoint, "127.0.0.1")
                        for k in range(i + 1)
                    }
                )
            await wait_until(lambda: len({a for _, a, _ in published.all}) == 20)
        for peer in (status, sql):
            for _ in range(20):
                await asyncio.wait_for(peer.connection_ends.get(), 5)


async def test_silent_nodes_do_not_delay_other_checks() -> None:
    """Nodes that answer are probed many times before the first probe of a silent node ends."""
    interval, timeout, node_count, probes_per_node = 1.0, 60.0, 80, 5
    async with (
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        run_fake_server(send_parts()) as silent,
    ):
        with full_backlog() as unreachable:
            targets: dict[str, CheckTarget] = {}
            for i in range(node_count):
                targets |= target(f"good{i}:4000", sql.endpoint, status.endpoint)
                targets |= target(
                    f"unreachable{i}:4000", unreachable if i % 2 else silent.endpoint, unreachable
                )
            async with checking(checks(interval=interval, timeout=timeout)) as (checker, published):

                def are_probed() -> bool:
                    latest = {address: health for _, address, health in published.all}
                    return len(latest) == node_count and all(
                        health.status is not None
                        and health.sql is not None
                        and min(health.status.consecutive, health.sql.consecutive) >= probes_per_node
                        for health in latest.values()
                    )

                checker.set_targets(targets)
                await wait_until(are_probed, timeout / 2)
    assert {address.rstrip("0123456789:")[:4] for _, address, _ in published.all} == {"good"}
    for kind in ("status", "sql"):
        probe_times: dict[str, set[float]] = defaultdict(set)
        for _, address, health in published.all:
            if (result := getattr(health, kind)) is not None:
                assert result.status is CheckStatus.PASS
                probe_times[address].add(result.at)
        times_per_node = [sorted(times) for times in probe_times.values()]
        assert [len(times) >= probes_per_node for times in times_per_node] == [True] * node_count
        # The second probe is early by a random time. Later probes are periodic.
        periods = [b - a for times in times_per_node for a, b in itertools.pairwise(times[1:])]
        assert abs(statistics.median(periods) - interval) < 0.1
        # The probes are spread: each fifth of the interval contains probes of fewer than half of the nodes.
        fifths = [int((times[1] % interval) / interval * 5) for times in times_per_node]
        assert max(fifths.count(fifth) for fifth in range(5)) < node_count / 2


@contextlib.asynccontextmanager
async def node_with_blockers() -> AsyncIterator[
    tuple[FakeStatusPort, FakeServer, HealthChecker, PublishedHealth]
]:
    """Yield a node whose sessions cannot migrate, after the checker has detected the migration blockers."""
    port = FakeStatusPort()
    async with run_fake_server(port) as status, checking(checks(sql=False)) as (checker, published):
        checker.set_targets(target("a:1", "127.0.0.1:1", status.endpoint))
        await wait_until(lambda: bool(published.all) and bool(published.latest.migration_blockers))
        yield port, status, checker, published


CONFIG_WITH_MIGRATION = CONFIG_WITHOUT_MIGRATION.replace(b'""', b'"/tidb/session.crt"')


async def test_node_configuration_is_read_once_per_start() -> None:
    async with node_with_blockers() as (port, status, _, published):
        assert published.latest.migration_blockers[0].startswith("its sessions cannot migrate")
        await wait_until(lambda: port.requested_paths.count("/status") >= 5)
        assert (port.requested_paths[:2], port.requested_paths.count("/config")) == (
            ["/status", "/config"],
            1,
        )
        port.status, port.config = http_response(500, b""), http_response(200, CONFIG_WITH_MIGRATION)
        await wait_until(lambda: published.latest.status.status is CheckStatus.STOPPING)  # type: ignore[union-attr]
        assert published.latest.migration_blockers
        port.status = http_response(200, STATUS_BODY)
        await wait_until(lambda: not published.latest.migration_blockers)
        assert port.requested_paths.count("/config") == 2
        assert status.connections == 1


async def test_blockers_return_when_the_check_is_enabled_again() -> None:
    async with node_with_blockers() as (_, _, checker, published):
        checker.configure(checks(sql=False, status=False), proxy_protocol=False)
        assert not published.latest.migration_blockers
        checker.configure(checks(sql=False), proxy_protocol=False)
        await wait_until(lambda: bool(published.latest.migration_blockers))


async def test_blockers_stay_while_the_configuration_is_unreadable() -> None:
    async with node_with_blockers() as (port, _, _, published):
        port.status, port.config = http_response(500, b""), http_response(404, b"no")
        await wait_until(lambda: published.latest.status.status is CheckStatus.STOPPING)  # type: ignore[union-attr]
        port.status = http_response(200, STATUS_BODY)
        await wait_until(lambda: published.latest.status.status is CheckStatus.PASS)  # type: ignore[union-attr]
        requests = len(port.requested_paths)
        await wait_until(lambda: len(port.requested_paths) >= requests + 3)
        assert port.requested_paths.count("/config") == 2
        assert published.latest.migration_blockers


@pytest.mark.parametrize("config", [http_response(404, b"no"), http_response(200, STATUS_BODY), b""])
async def test_unreadable_configuration_gives_no_blockers(config: bytes) -> None:
    port = FakeStatusPort()
    port.config = config
    async with (
        run_fake_server(port) as status,
        checking(checks(sql=False, timeout=0.1)) as (checker, published),
    ):
        checker.set_targets(target("a:1", "127.0.0.1:1", status.endpoint))
        await wait_until(lambda: port.requested_paths.count("/status") >= 5)
        assert port.requested_paths.count("/config") == 1
        healths = published.healths_of("a:1")
        assert {health.migration_blockers for health in healths} == {()}
        assert {health.status.status for health in healths if health.status} == {CheckStatus.PASS}

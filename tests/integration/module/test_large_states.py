"""Sessions with large states delay no other session, and the total memory for states is limited.

A session's states are the result of SHOW SESSION_STATES, from which another node restores the session.
`TIDEVOY_SOAK=1 pytest -s tests/integration/module/test_large_states.py` uses 500 sessions of up to 60 MiB,
and prints how much memory Envoy uses.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.machine import memory_mib, peak_memory_mib, reset_peak_memory
from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import LoopDurations
from sandbox.tidb_sim.mariadb_backend import parse_row
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.load.large_states import INSERT, INSERTED_ROWS, ROW_COUNT, LargeStatesNode, build_states
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap, publish_nodes
from tests.support.module.envoy import ModuleEnvoy, connect_logged_in, serve_envoy, with_timeout
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

MIB = 1 << 20
MAX_BYTES = 4 * MIB
"""Limit for the states of one session (`states_max_bytes`)."""
MAX_ITERATION_MS = 20.0
"""Limit for one iteration of a worker's event loop on an idle machine."""
MAX_ITERATION_BYTES = 2 * 128 * 1024
"""Limit for the mean bytes of states that a worker reads in one iteration.

It reads up to 128 KiB when it handles its own events, and up to 128 KiB when it handles Envoy's.
"""
OVERHEAD_BYTES = 24 * MIB
"""Memory that Envoy may use in addition to the states: socket buffers, unused pages of its heap."""
TIMEOUT_SECONDS = 900.0 if SOAK else 60.0
pytestmark = [pytest.mark.timeout(TIMEOUT_SECONDS + 60), pytest.mark.needs_migration]


@dataclass
class LargeStatesSetup:
    """An Envoy with one worker, the `old` node with the sessions, and `new`, to which they migrate."""

    proxy: ModuleEnvoy
    old: LargeStatesNode
    new: LargeStatesNode
    endpoints: Path
    clients: list[RawClient] = field(default_factory=list)

    @asynccontextmanager
    async def measured(self, label: str, *, budget: int, read: int) -> AsyncIterator[None]:
        """Check that Envoy needs at most `budget` + OVERHEAD_BYTES, and reads in short iterations.

        `read`: number of bytes of states that Envoy reads during the block.
        """
        first, began = await self.read_iterations(), time.monotonic()
        before = memory_mib(self.proxy.pid)
        reset_peak_memory(self.proxy.pid)
        yield
        seconds, peak = time.monotonic() - began, peak_memory_mib(self.proxy.pid)
        durations = event_loop_latency.subtract(await self.read_iterations(), first)
        longest = event_loop_latency.longest_ms(durations)
        print(
            f"{label}: {seconds:.1f} s, memory of Envoy: {before:.1f} MiB before, {peak:.1f} MiB at most,"
            f" {sum(durations.values())} iterations of the worker, the longest {longest:.2f} ms"
        )
        assert (peak - before) * MIB <= budget + OVERHEAD_BYTES
        assert sum(durations.values()) >= read // MAX_ITERATION_BYTES
        if SOAK:
            assert longest <= MAX_ITERATION_MS

    def drain(self) -> None:
        publish_nodes(self.endpoints, [Host(self.old.endpoint, state="draining"), Host(self.new.endpoint)])

    async def open_sessions(self, sessions: int) -> None:
        """Open sessions on the old node, and set their ROW_COUNT() by an insert."""
        for _ in range(sessions):
            client = await connect_logged_in(self.proxy)
            self.clients.append(client)
            _, payload = await ask(client, INSERT)
            assert payload[:2] == bytes((0, INSERTED_ROWS))

    async def value(self, name: str, *labels: str) -> int:
        """Return the last value that the module reported for this series."""
        return (await self.proxy.metrics()).get((name, labels), 0)

    async def wait_for_stayed(self, reason: str, times: int) -> None:
        """Wait until this many migrations have failed for this reason."""

        async def have_failed() -> bool:
            return await self.value("migrations", self.old.endpoint, reason, "stayed") >= times

        await wait_until(have_failed, TIMEOUT_SECONDS)

    async def read_iterations(self) -> LoopDurations:
        """Return the durations of all event loop iterations of the worker so far.

        Envoy merges its histograms periodically, and then updates `server.uptime`.
        """
        for _ in range(2):  # the first update may belong to a merge that had already begun
            uptime = await self.proxy.stats("^server.uptime$")

            async def is_merged(before: Mapping[str, int] = uptime) -> bool:
                return await self.proxy.stats("^server.uptime$") != before

            await wait_until(is_merged)
        return event_loop_latency.parse_stats((await self.proxy.get(event_loop_latency.STATS_PATH)).json())

    async def check_all_on(self, node: LargeStatesNode) -> None:
        """Check that every client's session is on this node and unchanged."""
        for client in self.clients:
            _, head = await ask(client, ROW_COUNT)
            assert head == b"\x02"
            for _ in range(3):
                await with_timeout(client.read_packet())
            _, cells = await with_timeout(client.read_packet())
            await with_timeout(client.read_packet())
            assert parse_row(cells, 2) == (b"%d" % INSERTED_ROWS, node.endpoint.encode())


async def ask(client: RawClient, statement: bytes) -> tuple[int, bytes]:
    """Send a statement. Return the first packet of the answer."""
    client.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + statement))
    return await with_timeout(client.read_packet())


@asynccontextmanager
async def run_setup(
    directory: Path, size: int, *, budget: int, denies: bool = False
) -> AsyncIterator[LargeStatesSetup]:
    """Run a `LargeStatesSetup` whose sessions have states of `size` bytes each.

    `budget`: maximum bytes for the states of all sessions. `denies`: the new node denies all sessions.
    """
    endpoints = directory / "endpoints.json"
    memory = {"states_max_bytes": MAX_BYTES, "states_budget_bytes": budget}
    config = ModuleConfig(endpoints=endpoints, policy=memory)
    old, new = LargeStatesNode(size), LargeStatesNode(denies_tokens=denies, expected=build_states(size))
    async with old.listening(), new.listening():
        envoy_bootstrap = bootstrap([Host(old.endpoint), Host(new.endpoint, state="draining")], config)
        envoy_bootstrap |= {"enable_dispatcher_stats": True, "stats_flush_interval": "1s"}
        proxy = ModuleEnvoy(json.dumps(envoy_bootstrap), directory, concurrency=1)
        async with serve_envoy(proxy, config):
            _raise_priority(proxy)
            yield LargeStatesSetup(proxy, old, new, endpoints)
    assert (old.problems, new.problems) == ([], [])


def _raise_priority(proxy: ModuleEnvoy) -> None:
    """Give the worker the highest priority, if permitted: Envoy measures iterations by the wall clock.

    The priority is not a real-time one: each second, Linux suspends a real-time thread that is always busy
    for 50 ms (sched_rt_runtime_us).
    """
    for task in Path(f"/proc/{proxy.pid}/task").iterdir():
        if (task / "comm").read_text().startswith("wrk:"):
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), -20)


async def test_drain_of_sessions_with_too_large_states_uses_no_memory(tmp_path: Path) -> None:
    sessions, size = (500, 60 * MIB) if SOAK else (20, 8 * MIB)
    budget = 16 * MIB
    async with run_setup(tmp_path, size, budget=budget) as setup:
        await setup.open_sessions(sessions)
        label = f"{sessions} sessions of {size // MIB} MiB stay"
        async with setup.measured(label, budget=0, read=sessions * size):
            setup.drain()
            await setup.wait_for_stayed("states_too_large", sessions)
        assert (setup.old.export_count, setup.old.undone_count) == (sessions, sessions)
        await setup.proxy.wait_for_metrics({("states_bytes",): 0})
        await setup.check_all_on(setup.old)


async def test_sessions_with_large_states_migrate_within_the_budget(tmp_path: Path) -> None:
    sessions, size, budget = 500 if SOAK else 20, 3 * MIB, 16 * MIB
    async with run_setup(tmp_path, size, budget=budget) as setup:
        await setup.open_sessions(sessions)
        label = f"{sessions} sessions of {size // MIB} MiB migrate"
        async with setup.measured(label, budget=budget, read=sessions * size):
            setup.drain()
            await wait_until(lambda: setup.new.restored_count == sessions, TIMEOUT_SECONDS)
        await setup.check_all_on(setup.new)
        assert setup.old.export_count == setup.old.undone_count + sessions, (
            "every export without a migration was undone"
        )


async def test_states_saved_after_failed_migrations_are_bounded(tmp_path: Path) -> None:
    """Envoy keeps the states of failed migrations for 50 s, in at most half of the budget."""
    sessions, size = (500, 3 * MIB) if SOAK else (20, 1 * MIB)
    budget = 16 * MIB
    async with run_setup(tmp_path, size, budget=budget, denies=True) as setup:
        await setup.open_sessions(sessions)
        label = f"{sessions} sessions of {size // MIB} MiB cannot migrate"
        async with setup.measured(label, budget=budget, read=sessions * size):
            setup.drain()
            await setup.wait_for_stayed("denied", sessions)

        async def states_within_budget() -> bool:
            return budget // 4 < await setup.value("states_bytes") <= budget

        await wait_until(states_within_budget)
        await setup.check_all_on(setup.old)


async def test_session_that_exceeds_the_budget_stays_unchanged(tmp_path: Path) -> None:
    async with run_setup(tmp_path, 3 * MIB, budget=2 * MIB) as setup:
        await setup.open_sessions(1)
        setup.drain()
        await setup.wait_for_stayed("states_budget", 1)
        await setup.check_all_on(setup.old)
        assert setup.new.restored_count == 0


async def test_session_with_too_large_states_is_exported_less_often(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Envoy exports the large session once while it exports a denied small session three times."""
    async with run_setup(tmp_path, 5 * MIB, budget=64 * MIB) as large:
        async with run_setup(
            tmp_path_factory.mktemp("denied"), 1 * MIB, budget=64 * MIB, denies=True
        ) as small:
            for setup in (large, small):
                await setup.open_sessions(1)
                setup.drain()
            await large.wait_for_stayed("states_too_large", 1)
            await large.check_all_on(large.old)
            await wait_until(lambda: small.old.export_count == 3)
        assert large.old.export_count == 1

"""Sessions with large states: they keep no other session waiting, and take a bounded memory all together.

`TIDEVOY_SOAK=1 pytest -s tests/integration/test_module_large_states.py`: 500 sessions with 60 MiB each, and
prints what Envoy takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bench import turns
from bench.turns import Turns
from sandbox.tidb_sim.backing import cells_of
from sandbox.tidb_sim.packets import Command, frame
from tests.awaiting import until
from tests.load.large_states import INSERT, ROW_COUNT, ROWS, LargeStatesNode, states
from tests.module_rig import Envoy, Host, Parts, bootstrap, logged_in, serving, tell, within
from tests.tidb_sim_rig import Raw

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
MIB = 1 << 20
LONGEST_TURN = 20.0
"""Milliseconds that one turn of a worker may take, where the machine has nothing else to do."""
IN_A_TURN = 192 * 1024
"""Bytes of states that a worker may read in one turn; some turns read less."""
BESIDE = 24 * MIB
"""What Envoy may take beside the states: buffers of sockets and TLS, its own heap's pages."""
SECONDS = 900.0 if SOAK else 60.0
pytestmark = pytest.mark.timeout(SECONDS + 60)


@dataclass
class Site:
    """An Envoy with one worker, a node that sessions are on, and one that they are to go to."""

    proxy: Envoy
    old: LargeStatesNode
    new: LargeStatesNode
    endpoints: Path
    clients: list[Raw] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes that Envoy took at times."""

    @asynccontextmanager
    async def measured(self, what: str, *, budget: int, read: int) -> AsyncIterator[None]:
        """Within this Envoy takes no more memory than that, and reads so many bytes in short turns."""
        before, first, began = self.size, await self.turns(), time.monotonic()
        self.sizes.clear()
        yield
        took, peak = time.monotonic() - began, max(self.sizes)
        passed = turns.since(await self.turns(), first)
        longest = turns.longest(passed)
        print(
            f"{what}: {took:.1f} s, Envoy has {before / MIB:.1f} MiB before and {peak / MIB:.1f} at most,"
            f" {sum(passed.values())} turns of the worker, the longest {longest:.2f} ms"
        )
        assert peak - before <= budget + BESIDE
        assert sum(passed.values()) >= read // IN_A_TURN
        if SOAK:
            assert longest <= LONGEST_TURN

    def drain(self) -> None:
        tell(self.endpoints, [Host(self.old.endpoint, state="draining"), Host(self.new.endpoint)])

    async def begin(self, sessions: int) -> None:
        """So many sessions on the old node, each of which has changed some rows."""
        for _ in range(sessions):
            client = await logged_in(self.proxy)
            self.clients.append(client)
            _, payload = await ask(client, INSERT)
            assert payload[:2] == bytes((0, ROWS))

    async def told(self, name: str, *labels: str) -> int:
        """What the module has told last of this series."""
        return (await self.proxy.metrics()).get((name, labels), 0)

    async def stayed(self, reason: str, times: int) -> None:
        """Returns when so many moves have failed for this reason."""

        async def have_failed() -> bool:
            return await self.told("migrations", self.old.endpoint, reason, "stayed") >= times

        await until(have_failed, SECONDS)

    @property
    def size(self) -> int:
        return int(psutil.Process(self.proxy.pid).memory_info().rss)

    async def turns(self) -> Turns:
        await asyncio.sleep(0.2)  # Envoy merges its histograms at times
        return turns.told((await self.proxy.get(turns.PAGE)).json())

    async def goes_on(self, at: LargeStatesNode) -> None:
        """Every client finds its session as it was, on that node."""
        for client in self.clients:
            _, head = await ask(client, ROW_COUNT)
            assert head == b"\x02"
            for _ in range(3):
                await within(client.packet())
            _, cells = await within(client.packet())
            await within(client.packet())
            assert cells_of(cells, 2) == (b"%d" % ROWS, at.endpoint.encode())


async def ask(client: Raw, statement: bytes) -> tuple[int, bytes]:
    """The first packet of the answer."""
    client.writer.write(frame(0, bytes((Command.QUERY,)) + statement))
    return await within(client.packet())


@asynccontextmanager
async def site(
    directory: Path, size: int, *, budget: int, most: int = 4 * MIB, denies: bool = False
) -> AsyncIterator[Site]:
    """Nodes with sessions whose states have `size` bytes; `most` and `budget`: the settings."""
    endpoints = directory / "endpoints.json"
    memory = {"states_max_bytes": most, "states_budget_bytes": budget}
    parts = Parts(endpoints=endpoints, policy=memory)
    old, new = LargeStatesNode(size), LargeStatesNode(denies=denies, expected=states(size))
    async with old.listening(), new.listening():
        tree = bootstrap([Host(old.endpoint), Host(new.endpoint, state="draining")], parts)
        tree |= {"enable_dispatcher_stats": True, "stats_flush_interval": "1s"}
        proxy = Envoy(json.dumps(tree), directory, concurrency=1)
        async with serving(proxy, parts):
            _prefer(proxy)
            place = Site(proxy, old, new, endpoints)
            watching = asyncio.create_task(_watch(place))
            try:
                yield place
            finally:
                watching.cancel()
    assert (old.wrong, new.wrong) == ([], [])


def _prefer(proxy: Envoy) -> None:
    """Turns are measured by the clock: other processes may not take the worker's CPU, if that can be had."""
    for task in Path(f"/proc/{proxy.pid}/task").iterdir():
        if (task / "comm").read_text().startswith("wrk:"):
            with suppress(PermissionError):
                os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


async def _watch(place: Site) -> None:
    while True:
        place.sizes.append(place.size)
        await asyncio.sleep(0.02)


async def test_a_drain_of_sessions_with_too_large_states_takes_no_memory(tmp_path: Path) -> None:
    """Each is asked once, and stays as it was."""
    sessions, size = (500, 60 * MIB) if SOAK else (20, 8 * MIB)
    budget = 16 * MIB
    async with site(tmp_path, size, budget=budget) as place:
        await place.begin(sessions)
        what = f"{sessions} sessions of {size // MIB} MiB stay"
        async with place.measured(what, budget=0, read=sessions * size):
            place.drain()
            await place.stayed("states_too_large", sessions)
        assert (place.old.exports, place.old.undone) == (sessions, sessions)
        assert await place.told("states_bytes") == 0
        await place.goes_on(place.old)


async def test_sessions_with_large_states_move_within_the_budget(tmp_path: Path) -> None:
    sessions, size, budget = 500 if SOAK else 20, 3 * MIB, 16 * MIB
    async with site(tmp_path, size, budget=budget) as place:
        await place.begin(sessions)
        what = f"{sessions} sessions of {size // MIB} MiB move"
        async with place.measured(what, budget=budget, read=sessions * size):
            place.drain()
            await until(lambda: place.new.arrived == sessions, SECONDS)
        await place.goes_on(place.new)
        assert place.old.exports == place.old.undone + sessions, "what did not move was put back"


async def test_states_that_are_kept_after_failed_moves_have_a_bound(tmp_path: Path) -> None:
    """They are kept for 50 s, in case the node breaks off: as many as half of the budget holds."""
    sessions, size = (500, 3 * MIB) if SOAK else (20, 1 * MIB)
    budget = 16 * MIB
    async with site(tmp_path, size, budget=budget, denies=True) as place:
        await place.begin(sessions)
        what = f"{sessions} sessions of {size // MIB} MiB cannot move"
        async with place.measured(what, budget=budget, read=sessions * size):
            place.drain()
            await place.stayed("denied", sessions)
        assert budget // 4 < await place.told("states_bytes") <= budget, "some are kept"
        await place.goes_on(place.old)


async def test_where_the_budget_has_no_room_a_session_stays_as_it_was(tmp_path: Path) -> None:
    async with site(tmp_path, 3 * MIB, budget=2 * MIB) as place:
        await place.begin(1)
        place.drain()
        await place.stayed("states_budget", 1)
        await place.goes_on(place.old)
        assert place.new.arrived == 0


async def test_a_session_with_too_large_states_is_asked_less_often_than_others(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One that can move in the end, and one that cannot: their node is asked again and again, or once."""
    async with site(tmp_path, 5 * MIB, budget=64 * MIB) as large:
        async with site(tmp_path_factory.mktemp("denied"), 1 * MIB, budget=64 * MIB, denies=True) as small:
            for place in (large, small):
                await place.begin(1)
                place.drain()
            await large.stayed("states_too_large", 1)
            await large.goes_on(large.old)
            await until(lambda: small.old.exports == 3)
        assert large.old.exports == 1

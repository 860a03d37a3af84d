"""What moving sessions costs: others on the same worker, Envoy in the long run, and who is moved."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from bench.load_client import LoadClient
from bench.migration import event_loop_latency
from bench.migration.cluster import FLUSHED, Site, all_alive, site
from bench.migration.figures import Crowd, Long, While, crowd_figures, long_figures, rolling_figures
from bench.migration.rolling_restart import NODES, UNHURRIED, Combination, Rolled, rolled
from bench.migration.statement_latency import Window, timing
from bench.reporting.report import Figure
from bench.resource_usage import Held, most_files
from controlplane.xds.bootstrap import module_path
from sandbox.child_process import ProcessFailed, ProgramMissing
from sandbox.local_cluster import Stack
from sandbox.session_certificate import SessionCertificate

SESSIONS = 10_000
MOVES = 100_000
ROUNDS = 3
METHOD = (
    "One Envoy with one worker, configured by a real control plane with default settings, in front of small"
    " stand-ins that answer at once (`bench/migration/fake_node.py`), all on one machine. A crowd: idle sessions on"
    " ten nodes of equal weight, one of which is drained. Meanwhile one more session of the same worker asks"
    " a statement each millisecond (`bench/migration/stopwatch.py`); its node takes hardly any part and is a process of"
    " its own. Shown are its slowest statement and the longest turn of the worker's event loop as Envoy"
    " counts it (`enable_dispatcher_stats`), and both in a while without a drain. To and fro: sessions that"
    " move between two nodes, drained in turn, at most 5,000 a second; what Envoy holds after a tenth, a half"
    " and all of the moves, and after the last session has gone. Rolling: sysbench oltp_read_write with 32"
    " clients (prepared statements, no TLS, two workers) on stand-ins for TiDB over MariaDB, while each node"
    " is drained, stopped, started and put into service again; the slowest statement of one more session,"
    " which does nothing else."
)
_NODES = 10
_ROOM = 200
"""Files that Envoy needs beside two for each session."""
_QUIET = 5.0
"""Seconds without a drain."""
_TO_AND_FRO = 2_000
"""Sessions that move so, if so many moves are wanted."""
_FAST = {"per_second": 5_000, "at_once": 256}
_MARKS = (0.1, 0.5, 1.0)
_WARM_UP = 20
_LOGINS = 1_000.0
"""New sessions a second while a crowd comes."""


async def measure(sessions: int = SESSIONS, moves: int = MOVES, rounds: int = ROUNDS) -> list[Figure]:
    """So many idle sessions, moves to and fro, and rolling restarts: about six minutes with all as it is.

    ProgramMissing without the module, or without what is needed to build the load client.
    """
    module = module_path.find()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    with tempfile.TemporaryDirectory(prefix="tidevoy-bench-") as name:
        directory = Path(name)
        client = await LoadClient.ready(directory)
        crowd = await crowded(directory / "crowd", module, client, fitting(sessions, most_files()))
        long = await to_and_fro(directory / "long", module, client, moves)
        roll = await _rolling(directory / "rolling", module, rounds)
    return [*crowd_figures(crowd), *long_figures(long), *rolling_figures(roll, rounds)]


def fitting(sessions: int, files: int) -> int:
    """As many of these sessions as an Envoy can have that may open so many files; the same on each node."""
    return max(_NODES, min(sessions, (files - _ROOM) // 2) // _NODES * _NODES)


async def crowded(directory: Path, module: Path, client: LoadClient, sessions: int) -> Crowd:
    """Drain one of ten nodes on which these sessions are. ProcessFailed: one of them noticed; NotInTime."""
    async with site(directory, module, _NODES, apart=True) as (place, [*nodes, _]):
        # The session beside comes while no other node takes one.
        await place.drain(*nodes)
        await place.follows()
        async with timing(place.port, directory, prepared=False) as stopwatch:
            await place.undrain(*nodes)
            held = client.idle(place.port, connections=sessions, ramp=_LOGINS, seconds=sessions / 100 + 30)
            async with held as found:
                there = (await place.seen()).sessions[nodes[0]]
                await asyncio.sleep(FLUSHED)
                first, begin = await place.turns(), time.monotonic()
                await asyncio.sleep(_QUIET)
                quiet = Window(begin, time.monotonic())
                await asyncio.sleep(FLUSHED)
                second = await place.turns()
                begin = await place.drain(nodes[0])
                drained = Window(begin, await place.empty(nodes[0]))
                await asyncio.sleep(FLUSHED)
                third, seen = await place.turns(), await place.seen()
            all_alive(found, sessions)
            asked = await stopwatch.stop()
    _nobody_came_again(seen.logins.total(), sessions + 1)
    return Crowd(
        sessions,
        there,
        asked,
        While(quiet, event_loop_latency.since(second, first)),
        While(drained, event_loop_latency.since(third, second)),
    )


async def to_and_fro(directory: Path, module: Path, client: LoadClient, moves: int) -> Long:
    """Drain two nodes in turn until sessions have moved so often. ProcessFailed as above; NotInTime."""
    async with site(directory, module, 2, settings={"migration": _FAST}) as (place, [here, there]):
        await place.drain(there)
        await place.follows()
        here, there = await _moved_once(place, client, here, there)
        before, sessions = await place.held(), max(1, min(_TO_AND_FRO, moves // 10))
        samples: list[tuple[int, Held]] = []
        moved, took = 0, 0.0
        async with client.idle(place.port, connections=sessions, ramp=_LOGINS) as found:
            while moved < moves:
                begin = time.monotonic()
                here, there = await _swapped(place, here, there)
                took += time.monotonic() - begin
                moved += sessions
                if moved >= moves * _MARKS[len(samples)]:
                    samples.append((moved, await place.held()))
            seen = await place.seen()
        all_alive(found, sessions)
        _nobody_came_again(seen.logins.total(), sessions + _WARM_UP)
        await _gone(place)
        return Long(sessions, took, before, samples, await place.held(), await place.counted())


async def _moved_once(place: Site, client: LoadClient, here: str, there: str) -> tuple[str, str]:
    """A few sessions come, move and go: what Envoy and the module keep for good is there then."""
    async with client.idle(place.port, connections=_WARM_UP):
        here, there = await _swapped(place, here, there)
    await _gone(place)
    return here, there


async def _swapped(place: Site, here: str, there: str) -> tuple[str, str]:
    """All sessions move; where they are now, and where they were."""
    await place.undrain(there)
    await place.drain(here)
    await place.empty(here)
    return there, here


async def _gone(place: Site) -> None:
    await place.until(lambda seen: not seen.sessions.total(), "all sessions to be gone")
    # The module takes its time to say so, and Envoy to close what it closes late.
    await asyncio.sleep(FLUSHED)


async def _rolling(directory: Path, module: Path, rounds: int) -> Rolled:
    arguments = SessionCertificate.make(directory).arguments
    async with Stack.start(directory / "stack", nodes=0, module=module) as stack:
        for _ in range(NODES):
            await stack.add_tidb(*arguments)

        async def serves() -> bool:
            return list((await stack.states()).values()).count("active") == NODES and await stack.envoy.live()

        await stack.wait_until(serves, f"{NODES} active nodes behind Envoy", 60.0)
        combination = Combination(prepared=True, tls=False, workers=2)
        found = await rolled(stack, combination, directory / "load", rounds=rounds, rate=UNHURRIED)
        if violations := stack.violations():
            raise ProcessFailed("Envoy", "has broken the protocol towards a node", "\n".join(violations))
        return found


def _nobody_came_again(logins: int, expected: int) -> None:
    if logins != expected:
        raise ProcessFailed("Envoy", f"has lost sessions: {expected} came, {logins} have logged in", "")

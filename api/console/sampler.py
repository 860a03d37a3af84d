"""Looks at all nodes every few seconds, for the charts; never for long at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from api.console.history import INTERVAL, Count, History
from controlplane.clock import Clock
from controlplane.engine.engine import Engine
from controlplane.errors import UnknownNode
from controlplane.model.traffic import NO_BUCKETS, Traffic

FLEET = ""  # the name under which the history has all nodes together

# Seconds of work after which the loop is left to others for as long; with many nodes and Envoys a look at
# all of them takes longer than others may wait.
_SLICE = 0.005


async def sample(engine: Engine, history: History, clock: Clock) -> None:
    """Keep the history up to date until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        await look(engine, history, clock)
        await asyncio.sleep(max(INTERVAL - (loop.time() - began), _SLICE))


async def look(engine: Engine, history: History, clock: Clock) -> None:
    """One point for each node, and one for all of them."""
    loop = asyncio.get_running_loop()
    plan, facts = engine.seen()
    tellers = frozenset(facts.reports)
    counts: list[Count] = []
    until = loop.time() + _SLICE
    for address in plan.nodes:
        if loop.time() > until:
            await asyncio.sleep(_SLICE)
            until = loop.time() + _SLICE
        try:
            view = engine.node(address)
        except UnknownNode:
            continue  # forgotten meanwhile
        counts.append(_count(view.sessions, view.traffic))
        history.put(address, clock(), counts[-1], tellers)
    history.put(FLEET, clock(), _together(counts), tellers)
    history.keep([FLEET, *plan.nodes])


def _count(sessions: int | None, traffic: Traffic | None) -> Count:
    if traffic is None:
        return Count(sessions)
    return Count(sessions, sum(traffic.commands.values()), traffic.buckets)


def _together(counts: Collection[Count]) -> Count:
    told = [count.sessions for count in counts if count.sessions is not None]
    commands = [count.commands for count in counts if count.commands is not None]
    buckets = tuple(map(sum, zip(NO_BUCKETS, *(count.buckets for count in counts), strict=True)))
    return Count(sum(told) if told else None, sum(commands) if commands else None, buckets)

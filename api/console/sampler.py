"""Looks at all nodes every few seconds, for the charts; never for long at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from api.console.history import INTERVAL_SECONDS, History, TrafficSample
from controlplane.clock import Clock
from controlplane.engine.engine import Engine
from controlplane.errors import UnknownNode
from controlplane.model.traffic import EMPTY_BUCKETS, Traffic

FLEET_KEY = ""  # the name under which the history has all nodes together

# Seconds of work after which the loop is left to others for as long; with many nodes and Envoys a look at
# all of them takes longer than others may wait.
_MAX_SLICE_SECONDS = 0.005


async def run_sampler(engine: Engine, history: History, clock: Clock) -> None:
    """Keep the history up to date until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        started_at = loop.time()
        await take_sample(engine, history, clock)
        await asyncio.sleep(max(INTERVAL_SECONDS - (loop.time() - started_at), _MAX_SLICE_SECONDS))


async def take_sample(engine: Engine, history: History, clock: Clock) -> None:
    """One point for each node, and one for all of them."""
    loop = asyncio.get_running_loop()
    plan, facts = engine.plan_and_facts()
    reporting_envoys = frozenset(facts.module_reports)
    counts: list[TrafficSample] = []
    slice_end = loop.time() + _MAX_SLICE_SECONDS
    for address in plan.nodes:
        if loop.time() > slice_end:
            await asyncio.sleep(_MAX_SLICE_SECONDS)
            slice_end = loop.time() + _MAX_SLICE_SECONDS
        try:
            view = engine.node(address)
        except UnknownNode:
            continue  # forgotten meanwhile
        counts.append(_to_count(view.sessions, view.traffic))
        history.put(address, clock(), counts[-1], reporting_envoys)
    history.put(FLEET_KEY, clock(), _sum_counts(counts), reporting_envoys)
    history.retain([FLEET_KEY, *plan.nodes])


def _to_count(sessions: int | None, traffic: Traffic | None) -> TrafficSample:
    if traffic is None:
        return TrafficSample(sessions)
    return TrafficSample(sessions, sum(traffic.commands.values()), traffic.latency_buckets)


def _sum_counts(counts: Collection[TrafficSample]) -> TrafficSample:
    sessions = [count.sessions for count in counts if count.sessions is not None]
    commands = [count.commands for count in counts if count.commands is not None]
    buckets = tuple(map(sum, zip(EMPTY_BUCKETS, *(count.buckets for count in counts), strict=True)))
    return TrafficSample(sum(sessions) if sessions else None, sum(commands) if commands else None, buckets)

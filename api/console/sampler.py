"""Samples the traffic of all nodes every few seconds for the charts, without blocking the loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from api.console.history import INTERVAL_SECONDS, History, TrafficSample
from controlplane.clock import Clock
from controlplane.engine.engine import Engine
from controlplane.errors import UnknownNode
from controlplane.model.traffic import EMPTY_BUCKETS, Traffic

FLEET_KEY = ""  # the name of all nodes together in the history

# The sampler works in slices of this length, so that it never blocks the loop for longer.
_MAX_SLICE_SECONDS = 0.005
# It rests between two slices, so that it uses this share of a core at most. With 5,000 nodes and 100 Envoys,
# a sample of all nodes takes seconds of CPU time: there, points are minutes apart.
_MAX_CPU_SHARE = 0.02


async def run_sampler(engine: Engine, history: History, clock: Clock) -> None:
    """Keep the history up to date until cancelled."""
    loop = asyncio.get_running_loop()
    interval = INTERVAL_SECONDS
    while True:
        started_at = loop.time()
        await take_sample(engine, history, clock, interval)
        duration = loop.time() - started_at
        interval = max(INTERVAL_SECONDS, duration)
        await asyncio.sleep(max(INTERVAL_SECONDS - duration, rest_seconds(_MAX_SLICE_SECONDS)))


async def take_sample(engine: Engine, history: History, clock: Clock, interval: float) -> None:
    """Add one point for each node, and one for all of them together.

    `interval`: seconds between two samples at present.
    """
    loop = asyncio.get_running_loop()
    plan, _ = engine.plan_and_facts()
    envoys_at_start = reporting_envoys = _reporting_envoys(engine)
    counts: list[TrafficSample] = []
    slice_start = loop.time()
    for address in plan.nodes:
        if (worked := loop.time() - slice_start) > _MAX_SLICE_SECONDS:
            await asyncio.sleep(rest_seconds(worked))
            slice_start = loop.time()
            reporting_envoys = _reporting_envoys(engine)
        try:
            view = engine.node(address)
        except UnknownNode:
            continue  # removed meanwhile
        counts.append(_to_count(view.sessions, view.traffic))
        history.put(address, clock(), counts[-1], reporting_envoys, interval)
    # Counts from before and after such a change are of different Envoys: they compare with no others.
    fleet_envoys = envoys_at_start if reporting_envoys == envoys_at_start else {"", *envoys_at_start}
    history.put(FLEET_KEY, clock(), _sum_counts(counts), fleet_envoys, interval)
    history.retain([FLEET_KEY, *plan.nodes])


def _reporting_envoys(engine: Engine) -> frozenset[str]:
    _, facts = engine.plan_and_facts()
    return frozenset(facts.module_reports)


def rest_seconds(worked: float) -> float:
    """How long to rest after `worked` seconds of work."""
    return worked / _MAX_CPU_SHARE - worked


def _to_count(sessions: int | None, traffic: Traffic | None) -> TrafficSample:
    if traffic is None:
        return TrafficSample(sessions)
    return TrafficSample(sessions, sum(traffic.commands.values()), traffic.latency_buckets)


def _sum_counts(counts: Collection[TrafficSample]) -> TrafficSample:
    sessions = [count.sessions for count in counts if count.sessions is not None]
    commands = [count.commands for count in counts if count.commands is not None]
    buckets = tuple(map(sum, zip(EMPTY_BUCKETS, *(count.buckets for count in counts), strict=True)))
    return TrafficSample(sum(sessions) if sessions else None, sum(commands) if commands else None, buckets)

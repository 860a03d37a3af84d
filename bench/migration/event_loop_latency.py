"""Durations of the event loop iterations of an Envoy worker, from Envoy's dispatcher statistics.

Needs `enable_dispatcher_stats` in the bootstrap. In one iteration, a worker handles all events since the last
poll of its sockets. A session waits until the iteration ends before the worker serves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENABLE_STATS_YAML = "enable_dispatcher_stats: true\n"
"""The bootstrap setting that enables these statistics."""
STATS_PATH = "/stats?format=json&histogram_buckets=detailed&filter=worker_.*loop_duration_us"

LoopDurations = Mapping[float, int]
"""Number of iterations so far, by the upper bound of their duration (microseconds)."""


def parse_stats(page: Mapping[str, Any]) -> LoopDurations:
    """Parse the JSON of STATS_PATH and add up all workers."""
    durations: dict[float, int] = {}
    for stat in page.get("stats", []):
        for histogram in stat.get("histograms", {}).get("details", []):
            for bucket in histogram.get("totals", []):
                end = float(bucket["lower_bound"]) + float(bucket["width"])
                durations[end] = durations.get(end, 0) + int(bucket["count"])
    return durations


def subtract(now: LoopDurations, before: LoopDurations) -> LoopDurations:
    """Return the iterations between two readings."""
    return {end: count - before.get(end, 0) for end, count in now.items() if count > before.get(end, 0)}


def longest_ms(durations: LoopDurations) -> float:
    """Return the upper bound of the longest iteration in milliseconds; 0 without iterations."""
    return max(durations, default=0.0) / 1000


def count_longer(durations: LoopDurations, milliseconds: float) -> int:
    """Return how many iterations may have taken longer than `milliseconds`."""
    return sum(count for end, count in durations.items() if end > milliseconds * 1000)

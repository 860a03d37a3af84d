"""How long the turns of an Envoy worker's event loop take, as Envoy itself counts them.

Its dispatcher statistics (`enable_dispatcher_stats` in the bootstrap): one turn is all that a worker does
between two looks at its sockets. No other session is served meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENABLE_STATS_YAML = "enable_dispatcher_stats: true\n"
"""What a bootstrap needs for it."""
STATS_PATH = "/stats?format=json&histogram_buckets=detailed&filter=worker_.*loop_duration_us"

LoopDurations = Mapping[float, int]
"""How many so far, by the longest that they may have taken (microseconds)."""


def parse_stats(page: Mapping[str, Any]) -> LoopDurations:
    """What `PAGE` says of all workers."""
    found: dict[float, int] = {}
    for stat in page.get("stats", []):
        for one in stat.get("histograms", {}).get("details", []):
            for bucket in one.get("totals", []):
                end = float(bucket["lower_bound"]) + float(bucket["width"])
                found[end] = found.get(end, 0) + int(bucket["count"])
    return found


def subtract(now: LoopDurations, before: LoopDurations) -> LoopDurations:
    """Those in between."""
    return {end: count - before.get(end, 0) for end, count in now.items() if count > before.get(end, 0)}


def longest_ms(durations: LoopDurations) -> float:
    """At most so many milliseconds took the longest of them; 0 when there is none."""
    return max(durations, default=0.0) / 1000


def count_longer(durations: LoopDurations, milliseconds: float) -> int:
    """How many took longer than that."""
    return sum(count for end, count in durations.items() if end > milliseconds * 1000)

"""How long the turns of an Envoy worker's event loop take, as Envoy itself counts them.

Its dispatcher statistics (`enable_dispatcher_stats` in the bootstrap): one turn is all that a worker does
between two looks at its sockets. No other session is served meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTED = "enable_dispatcher_stats: true\n"
"""What a bootstrap needs for it."""
PAGE = "/stats?format=json&histogram_buckets=detailed&filter=worker_.*loop_duration_us"

Turns = Mapping[float, int]
"""How many so far, by the longest that they may have taken (microseconds)."""


def told(page: Mapping[str, Any]) -> Turns:
    """What `PAGE` says of all workers."""
    found: dict[float, int] = {}
    for stat in page.get("stats", []):
        for one in stat.get("histograms", {}).get("details", []):
            for bucket in one.get("totals", []):
                end = float(bucket["lower_bound"]) + float(bucket["width"])
                found[end] = found.get(end, 0) + int(bucket["count"])
    return found


def since(now: Turns, before: Turns) -> Turns:
    """Those in between."""
    return {end: count - before.get(end, 0) for end, count in now.items() if count > before.get(end, 0)}


def longest(turns: Turns) -> float:
    """At most so many milliseconds took the longest of them; 0 when there is none."""
    return max(turns, default=0.0) / 1000


def longer(turns: Turns, milliseconds: float) -> int:
    """How many took longer than that."""
    return sum(count for end, count in turns.items() if end > milliseconds * 1000)

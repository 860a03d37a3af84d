"""When changes are pushed: the first at once, a burst together, and none later than a limit."""

from __future__ import annotations

GATHER = 0.020  # seconds of quiet that end a burst
LATEST = 0.200  # seconds that a change waits at most


def due(last_push: float, first: float, latest: float) -> float:
    """When to push what has changed, in seconds on the clock of the arguments.

    `last_push` is when something was pushed last (minus infinity: never); `first` and `latest` are when the
    first and the latest change since then happened.
    """
    if first - last_push >= GATHER:
        return first
    return min(latest + GATHER, first + LATEST)

"""When changes are pushed: the first at once, a burst together, and none later than a limit."""

from __future__ import annotations

QUIET_SECONDS = 0.020  # seconds of quiet that end a burst
MAX_DELAY_SECONDS = 0.200  # seconds that a change waits at most


def next_push_at(last_push: float, first: float, latest: float) -> float:
    """When to push what has changed, in seconds on the clock of the arguments.

    `last_push` is when something was pushed last (minus infinity: never); `first` and `latest` are when the
    first and the latest change since then happened.
    """
    if first - last_push >= QUIET_SECONDS:
        return first
    return min(latest + QUIET_SECONDS, first + MAX_DELAY_SECONDS)

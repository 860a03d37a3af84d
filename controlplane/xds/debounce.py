"""When changes are pushed: the first at once, a burst as one push, and no change later than a limit."""

from __future__ import annotations

QUIET_SECONDS = 0.020  # a burst ends after this many seconds without a change
MAX_DELAY_SECONDS = 0.200  # no change waits longer than this


def next_push_at(last_push: float, first: float, latest: float) -> float:
    """Return when to push the pending changes, in seconds on the clock of the arguments.

    `last_push` is the time of the last push (minus infinity: never); `first` and `latest` are the times of
    the first and the latest change since then.
    """
    if first - last_push >= QUIET_SECONDS:
        return first
    return min(latest + QUIET_SECONDS, first + MAX_DELAY_SECONDS)

"""A clock in Unix seconds that never jumps while the process runs.

The wall clock is read once, and the monotonic clock gives the time elapsed since. Durations are therefore
right even if an operator or NTP sets the wall clock, and times can be shown as dates.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic_unix_clock() -> Clock:
    """Return a clock that starts at the current Unix time and then follows `time.monotonic`."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()

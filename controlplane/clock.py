"""A clock in Unix seconds that never jumps while the process runs.

The wall clock is read once; from then on the monotonic clock advances it. Durations stay right when an
operator or NTP sets the clock, and times still read as dates in logs and files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic_unix_clock() -> Clock:
    """Return a clock that starts at the current Unix time and then follows `time.monotonic`."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()

"""One steady clock: Unix seconds that never jump while the process lives.

The wall clock is read once; from then on the monotonic clock advances it. Durations stay right when an
operator or NTP sets the clock, and times still read as dates in logs and files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic_unix_clock() -> Clock:
    """A clock that starts at the present Unix time and then follows `time.monotonic`."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()

"""Token buckets, which limit how often something happens per key."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class TokenBuckets:
    """A token bucket for each key. Beyond `max_keys` buckets, the least recently used one is removed."""

    def __init__(self, max_keys: int, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._max_keys, self._clock = max_keys, clock
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # number of tokens, and when it was computed

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, rate: float, burst: float) -> float:
        """Take a token from the key's bucket, which has at most `burst` tokens and gets `rate` per second.

        Return 0 on success, otherwise the seconds until a token is available.
        """
        now = self._clock()
        tokens, updated_at = self._buckets.pop(key, (burst, now))
        tokens = min(burst, tokens + (now - updated_at) * rate)
        wait = max(0.0, (1.0 - tokens) / rate)
        self._buckets[key] = (tokens if wait else tokens - 1.0), now
        if len(self._buckets) > self._max_keys:
            del self._buckets[next(iter(self._buckets))]
        return wait

"""Token buckets that limit rates, for any number of keys in a bounded table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """A token bucket. Times are seconds of a monotonic clock."""

    tokens: float
    updated_at: float

    def take(self, rate: float, burst: float, now: float) -> float:
        """Take one token. Returns 0 on success, otherwise the seconds until a token is available."""
        self.tokens = min(burst, self.tokens + (now - self.updated_at) * rate)
        self.updated_at = now
        if self.tokens < 1.0:
            return (1.0 - self.tokens) / rate
        self.tokens -= 1.0
        return 0.0


class TokenBuckets:
    """A bucket for each key. When the table is full, the least recently used bucket is removed."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, rate: float, burst: float, now: float) -> float:
        """Take one token from the key's bucket, like `TokenBucket.take`. A new bucket is full."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._max_keys:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = TokenBucket(burst, now)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(rate, burst, now)

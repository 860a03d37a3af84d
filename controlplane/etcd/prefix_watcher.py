"""Follows all keys under a prefix: lists them, watches their changes, and retries after each failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

from controlplane.errors import Compacted, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import RangeResult, WatchBatch

STABLE_WATCH_SECONDS = 5.0  # after a watch of this duration, the next failure counts as a first failure
MAX_RETRY_SECONDS = 2.0
DENIED_RETRY_SECONDS = 30.0  # access denied: only an administrator can change this

# A listing of all keys, a batch of changes, or the reason why no changes arrive at the moment.
PrefixUpdate = RangeResult | WatchBatch | PdError


async def watch_prefix(
    client: EtcdClient, prefix: str, known_revision: int | None = None
) -> AsyncGenerator[PrefixUpdate, None]:
    """Yield all keys under `prefix`, then their changes, until closed. Yields PdError and never raises it.

    A listing replaces everything that was yielded before. A PdError means an outage: nothing is known about
    changes until the next listing or batch. If another member continues the watch at once, no PdError
    is yielded. `known_revision`: the caller knows all keys at this revision and needs no listing.
    """
    loop = asyncio.get_running_loop()
    revision = known_revision
    is_listed = revision is not None
    failures = 0
    while True:
        stable_at = float("inf")
        try:
            if revision is None:
                listing = await client.range(prefix)
                revision, is_listed = listing.revision, True
                yield listing
            async with aclosing(client.watch(prefix, revision + 1)) as batches:
                async for batch in batches:
                    stable_at = min(stable_at, loop.time() + STABLE_WATCH_SECONDS)
                    revision = batch.revision
                    yield batch
            revision = None  # list again: changes may be missing
            raise PdError(f"the watch on {prefix} has ended without a reason")
        except PdError as error:
            failures = 1 if loop.time() >= stable_at else failures + 1
            if isinstance(error, Compacted):
                revision = None
            elif not error.retryable:
                yield PdError(
                    f"{error}; give the client of pd.tls access to {prefix}: Tidevoy tries again every"
                    f" {DENIED_RETRY_SECONDS:g} s"
                )
            elif failures > 1 or not is_listed:
                yield error
            delay = _retry_delay(failures) if error.retryable else DENIED_RETRY_SECONDS
        await asyncio.sleep(delay)


def _retry_delay(failures: int) -> float:
    """Return the seconds until the next attempt: 0 after the first failure, as another member may work."""
    if failures < 2:
        return 0.0
    return min(MAX_RETRY_SECONDS, 0.1 * 2.0 ** min(failures - 2, 16)) * random.uniform(0.5, 1.0)

"""A local copy of all keys under a prefix in PD, kept current by a watch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType

from controlplane.errors import Compacted, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry, WatchBatch

# After a watch lasted this long, its loss counts as the first failure in a row.
_STABLE_SECONDS = 5.0
_MAX_RETRY_SECONDS = 1.0


class EtcdMirror:
    """While PD is unreachable, the keys stay as they were. `is_current`: changes are being received."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        *,
        on_change: Callable[[], None],
        on_outage: Callable[[str], None],
    ) -> None:
        """`on_change` is called when a key or `is_current` changes; `on_outage` gets the problem, then "".

        A lost stream that another member continues at once is no outage.
        """
        self._client = client
        self._prefix = prefix
        self._on_change, self._on_outage = on_change, on_outage
        self._entries: dict[str, Entry] = {}
        self._revision: int | None = None  # changes up to it are known; None: list all keys
        self._outage = ""
        self._stable_at = float("inf")
        self.is_current = False

    @property
    def entries(self) -> Mapping[str, Entry]:
        """A consistent copy of the current keys."""
        return MappingProxyType(dict(self._entries))

    async def load(self) -> None:
        """List all keys. Raises PdError."""
        listing = await self._client.range(self._prefix)
        self._entries = dict(listing.entries)
        self._revision = listing.revision
        self._on_change()

    async def run(self) -> None:
        """Keep the keys current until cancelled."""
        failures = 0
        while True:
            try:
                if self._revision is None:
                    await self.load()
                await self._follow(self._revision or 0)
            except PdError as error:
                if asyncio.get_running_loop().time() >= self._stable_at:
                    failures = 0
                self._stable_at = float("inf")
                failures += 1
                if isinstance(error, Compacted):
                    self._revision = None
                elif failures > 1:
                    self._mark_stale(str(error))
            await asyncio.sleep(_retry_delay(failures))

    async def _follow(self, revision: int) -> None:
        async with aclosing(self._client.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._apply(batch)

    def _apply(self, batch: WatchBatch) -> None:
        for change in batch.changes:
            if change.value is None:
                self._entries.pop(change.key, None)
            else:
                self._entries[change.key] = Entry(change.value, change.mod_revision)
        self._revision = batch.revision
        if not self.is_current:
            self.is_current = True
            self._stable_at = asyncio.get_running_loop().time() + _STABLE_SECONDS
            self._set_outage("")
        elif not batch.changes:
            return
        self._on_change()

    def _mark_stale(self, outage: str) -> None:
        if self.is_current:
            self.is_current = False
            self._on_change()
        self._set_outage(outage)

    def _set_outage(self, outage: str) -> None:
        if bool(outage) != bool(self._outage):
            self._on_outage(outage)
        self._outage = outage


def _retry_delay(failures: int) -> float:
    """Return the seconds before the next attempt: 0 after the first failure, to try another member."""
    if failures < 2:
        return 0.0
    return min(_MAX_RETRY_SECONDS, 0.1 * 2.0 ** min(failures - 2, 16)) * random.uniform(0.5, 1.0)

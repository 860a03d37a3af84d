"""A lease in PD that this process keeps alive, and until when it surely holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient

# Seconds before its end from which a lease counts as over: clocks run differently fast, and what is begun
# because it holds takes a moment.
_SAFETY_MARGIN_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_REVOKE_TIMEOUT_SECONDS = 2.0


def boottime_clock() -> float:
    """Seconds that go on while the machine sleeps, which `time.monotonic` does not count."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The lease of this process; when it has ended, a new one. `on_change` is called with each."""

    def __init__(
        self,
        client: EtcdClient,
        ttl_seconds: int,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = boottime_clock,
    ) -> None:
        self._client = client
        self._ttl_seconds = ttl_seconds
        self._on_change = on_change
        self._clock = clock
        self._valid_until = float("-inf")
        self.id: int | None = None

    @property
    def is_valid(self) -> bool:
        """Whether PD cannot have ended it yet: judged from when the last answered renewal was sent."""
        return self.id is not None and self._clock() < self._valid_until - _SAFETY_MARGIN_SECONDS

    async def run(self) -> None:
        """Have a lease until cancelled."""
        while True:
            try:
                self.id = await self._client.lease_grant(self._ttl_seconds)
            except PdError:
                await asyncio.sleep(_RETRY_SECONDS)  # whoever follows PD finds the same, and tells it
                continue
            await self._keep_alive(self.id)
            self.expire()

    def expire(self) -> None:
        """PD says that it has ended."""
        self._valid_until = float("-inf")
        self._on_change()

    async def revoke(self) -> None:
        """End it, and with it the keys that hang on it: nobody need wait until it runs out."""
        lease, self.id = self.id, None
        if lease is None:
            return
        try:
            async with asyncio.timeout(_REVOKE_TIMEOUT_SECONDS):
                await self._client.lease_revoke(lease)
        except (PdError, TimeoutError):
            pass  # it runs out by itself

    async def _keep_alive(self, lease: int) -> None:
        """Keep it alive until it has ended. Without an answer it may live on: a late one revives it."""
        is_new = True
        while True:
            sent = self._clock()
            try:
                seconds = await self._client.lease_renew(lease)
            except PdError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not seconds:
                return
            self._valid_until = sent + seconds
            if is_new:
                is_new = False
                self._on_change()
            # Counted from then, too: after an answer that took long the lease has not much left.
            await asyncio.sleep(max(0.0, sent + seconds / 3 - self._clock()))

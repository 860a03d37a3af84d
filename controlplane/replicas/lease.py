"""A lease in PD's etcd that this process keeps alive, and the time until which it is certainly valid."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controlplane.errors import PdError
from controlplane.etcd.client import EtcdClient

# The lease counts as invalid this long before it ends, because clocks run at different speeds, and because an
# operation that needs a valid lease takes time.
_SAFETY_MARGIN_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_REVOKE_TIMEOUT_SECONDS = 2.0


def boottime_clock() -> float:
    """Return the seconds since boot. Unlike `time.monotonic`, this includes the time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The lease of this process, replaced when it ends. `on_change` is called when a lease begins or ends."""

    def __init__(
        self,
        client: EtcdClient,
        ttl_seconds: int,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = boottime_clock,
    ) -> None:
        self._client = client
        self.ttl_seconds = ttl_seconds
        self._on_change = on_change
        self.clock = clock
        self._valid_until = float("-inf")
        self.id: int | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the lease is certainly valid: its TTL counts from when the last renewal was sent."""
        return self.id is not None and self.clock() < self._valid_until - _SAFETY_MARGIN_SECONDS

    async def run(self) -> None:
        """Grant and renew a lease until cancelled."""
        while True:
            try:
                self.id = await self._client.lease_grant(self.ttl_seconds)
            except PdError:
                await asyncio.sleep(_RETRY_SECONDS)  # `EtcdMirror` reports the outage
                continue
            await self._keep_alive(self.id)
            self.expire()

    def expire(self) -> None:
        """Mark the lease as ended, because PD reported its end."""
        self._valid_until = float("-inf")
        self._on_change()

    async def revoke(self) -> None:
        """Revoke the lease and its keys, so that no replica has to wait for the expiry."""
        lease, self.id = self.id, None
        if lease is None:
            return
        try:
            async with asyncio.timeout(_REVOKE_TIMEOUT_SECONDS):
                await self._client.lease_revoke(lease)
        except (PdError, TimeoutError):
            pass  # without the call, the lease expires by itself

    async def _keep_alive(self, lease: int) -> None:
        """Renew the lease until PD reports its end. After a failure the lease may still be valid: retry."""
        is_new = True
        while True:
            sent = self.clock()
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
            # Counted from when the renewal was sent, because a slow response leaves little of the TTL.
            await asyncio.sleep(max(0.0, sent + seconds / 3 - self.clock()))

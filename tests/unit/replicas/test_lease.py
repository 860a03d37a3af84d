"""A lease is valid for its TTL, less a margin, from when the last successful renewal was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from controlplane.errors import PdError
from controlplane.replicas.lease import Lease
from tests.support.waiting import assert_never, wait_until


class FakePd:
    """Grants and renews leases. `now` is the clock of the test; `delay` is the real duration of a renewal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.granted = 0
        self.ttl = 5.0  # the TTL that a renewal returns, in seconds; 0 if the lease has ended
        self.unavailable = False
        self.delay = 0.0  # seconds
        # If set: during the first renewal, `now` advances to this time; later renewals fail.
        self.only_response_at: float | None = None
        self.renewals = 0

    async def lease_grant(self, ttl: int) -> int:
        self.granted += 1
        return self.granted

    async def lease_renew(self, lease: int) -> float:
        self.renewals += 1
        await asyncio.sleep(self.delay)
        if self.unavailable:
            raise PdError("no PD member answers")
        if self.only_response_at is not None:
            self.now, self.unavailable = self.only_response_at, True
        return self.ttl


@contextlib.asynccontextmanager
async def running_lease(pd: FakePd, lease: Lease) -> AsyncIterator[None]:
    """Run the lease during the block, which begins when the first renewal has been sent."""
    running = asyncio.create_task(lease.run())
    try:
        await wait_until(lambda: pd.renewals > 0)
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


def create_lease(pd: FakePd) -> Lease:
    return Lease(pd, 5, on_change=lambda: None, clock=lambda: pd.now)  # type: ignore[arg-type]


async def test_validity_counts_from_when_the_renewal_was_sent() -> None:
    pd = FakePd()
    pd.only_response_at = 4.0
    lease = create_lease(pd)
    async with running_lease(pd, lease):
        await wait_until(lambda: lease.is_valid)
        for now, expected in ((4.0, True), (4.4, True), (4.6, False), (99.0, False)):
            pd.now = now
            assert lease.is_valid is expected


async def test_ended_lease_is_replaced() -> None:
    pd = FakePd()
    lease = create_lease(pd)
    async with running_lease(pd, lease):
        await wait_until(lambda: lease.is_valid)
        pd.ttl, pd.now = 0.0, 99.0
        assert not lease.is_valid
        await wait_until(lambda: pd.granted > 1)
        pd.ttl = 5.0
        await wait_until(lambda: lease.is_valid)
        assert lease.id == pd.granted


async def test_slow_renewals_keep_the_lease_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.replicas.lease._SAFETY_MARGIN_SECONDS", 0.1)
    pd = FakePd()
    pd.ttl, pd.delay = 1.5, 0.6
    clock = asyncio.get_running_loop().time
    lease = Lease(pd, 5, on_change=lambda: None, clock=clock)  # type: ignore[arg-type]
    async with running_lease(pd, lease):
        await wait_until(lambda: lease.is_valid)
        await assert_never(lambda: not lease.is_valid, 2.0)

"""How long a lease is believed: from when its last answered renewal was sent, however late the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from controlplane.errors import PdError
from controlplane.replicas.lease import Lease
from tests.support.waiting import assert_never, wait_until


class Pd:
    """Grants leases; renewals take as long as a test says, by the clock of the test or by the real one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.granted = 0
        self.seconds = 5.0  # that a renewal gives; 0: the lease has ended
        self.away = False
        self.takes = 0.0  # real seconds
        self.answer_at: float | None = None  # by the clock of the test; it is the last one
        self.renewed = 0

    async def lease_grant(self, ttl: int) -> int:
        self.granted += 1
        return self.granted

    async def lease_renew(self, lease: int) -> float:
        self.renewed += 1
        await asyncio.sleep(self.takes)
        if self.away:
            raise PdError("no PD member answers")
        if self.answer_at is not None:
            self.now, self.away = self.answer_at, True
        return self.seconds


@contextlib.asynccontextmanager
async def held(pd: Pd, lease: Lease) -> AsyncIterator[None]:
    running = asyncio.create_task(lease.run())
    try:
        await wait_until(lambda: pd.renewed > 0)
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


def of(pd: Pd) -> Lease:
    return Lease(pd, 5, on_change=lambda: None, clock=lambda: pd.now)  # type: ignore[arg-type]


async def test_it_counts_from_when_its_renewal_was_sent() -> None:
    pd = Pd()
    pd.answer_at = 4.0
    lease = of(pd)
    async with held(pd, lease):
        await wait_until(lambda: lease.is_valid)
        for now, holds in ((4.0, True), (4.4, True), (4.6, False), (99.0, False)):
            pd.now = now
            assert lease.is_valid is holds


async def test_one_that_ended_is_followed_by_another() -> None:
    pd = Pd()
    lease = of(pd)
    async with held(pd, lease):
        await wait_until(lambda: lease.is_valid)
        pd.seconds, pd.now = 0.0, 99.0
        assert not lease.is_valid
        await wait_until(lambda: pd.granted > 1)
        pd.seconds = 5.0
        await wait_until(lambda: lease.is_valid)
        assert lease.id == pd.granted


async def test_slow_answers_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.replicas.lease._SAFETY_MARGIN_SECONDS", 0.1)
    pd = Pd()
    pd.seconds, pd.takes = 1.5, 0.6
    clock = asyncio.get_running_loop().time
    lease = Lease(pd, 5, on_change=lambda: None, clock=clock)  # type: ignore[arg-type]
    async with held(pd, lease):
        await wait_until(lambda: lease.is_valid)
        await assert_never(lambda: not lease.is_valid, 2.0)

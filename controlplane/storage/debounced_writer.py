"""Writes a value in the background, soon after it has changed."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import Counter

from controlplane.aio import wait_at_most
from controlplane.errors import StateUnavailable, VersionConflict

log = structlog.get_logger("tidevoy.storage")

_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 16.0


class DebouncedWriter:
    """Writes the latest value at a bounded rate, and retries after a failure.

    Changes during a write or a pause are written together afterwards. If `run` is cancelled, changes may be
    unwritten: call `save` at the end.
    """

    def __init__(
        self,
        subject: str,
        failures: Counter,
        *,
        changed: asyncio.Event | None = None,
        max_interval: float | None = None,
        max_retry: float = _MAX_RETRY_SECONDS,
    ) -> None:
        """`subject` names the value in logs. Setting the event `changed` requests a write.

        An unchanged value is written again after `max_interval` seconds. `max_retry` is the longest pause
        after a failure, in seconds.
        """
        self._subject = subject
        self._failures = failures
        self._max_interval = max_interval
        self._max_retry = max_retry
        self._changed = changed if changed is not None else asyncio.Event()
        self._urgent = asyncio.Event()

    async def _write(self) -> float:
        """Write the latest value; return the seconds until the next write of a change that is not urgent.

        Raises StateUnavailable or VersionConflict; then `run` retries the write.
        """
        raise NotImplementedError

    async def _before_write(self) -> None:
        """Prepare a write of `run`. A direct call of `save` skips this."""

    def mark_changed(self, *, is_urgent: bool = False) -> None:
        """Request a write; an urgent one does not wait for the end of the pause."""
        self._changed.set()
        if is_urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Write after each change until cancelled."""
        failures = 0
        while True:
            await wait_at_most(self._changed, self._max_interval)
            await self._before_write()
            pause = await self.save()
            if pause is not None:
                failures = 0
                await wait_at_most(self._urgent, pause)
            else:
                await asyncio.sleep(min(self._max_retry, _MIN_RETRY_SECONDS * 2.0 ** min(failures, 16)))
                failures += 1

    async def save(self) -> float | None:
        """Write now; return the pause until the next write, or None if it failed. Failures are counted."""
        self._changed.clear()
        self._urgent.clear()
        try:
            return await self._write()
        except (StateUnavailable, VersionConflict) as error:
            self._failures.inc()
            log.warning(f"could not write {self._subject}", error=str(error))
            self._changed.set()
            return None
        except asyncio.CancelledError:
            self._changed.set()
            raise

"""What operators asked for, on our own disk too: whoever starts without PD keeps drained nodes drained."""

from __future__ import annotations

import asyncio

import structlog

from controlplane.errors import StateUnavailable
from controlplane.intents.repository import Intentions
from controlplane.storage.file_store import StateDirectory

log = structlog.get_logger("tidevoy.replicas")

_AGAIN = 5.0  # seconds after a write that failed


class IntentsCopy:
    """Written soon after each change. One that fails is tried again; nobody waits for it."""

    def __init__(self, directory: StateDirectory, intentions: Intentions) -> None:
        self._directory = directory
        self._intentions = intentions
        self._changed = asyncio.Event()
        self._changed.set()

    def changed(self) -> None:
        """Others are in force."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._changed.wait()
            if not await self.save():
                await asyncio.sleep(_AGAIN)

    async def save(self) -> bool:
        """Write them unless they are there already; whether they are now."""
        self._changed.clear()
        kept = await self._directory.read_intents()
        if kept.version and kept.value == self._intentions.now:
            return True
        try:
            await self._directory.save_intents(self._intentions.now, kept.version)
        except StateUnavailable as error:
            log.warning("what operators asked for could not be copied", error=str(error))
            self._changed.set()
            return False
        return True

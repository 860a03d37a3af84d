"""What operators asked for, on our own disk too: whoever starts without PD keeps drained nodes drained."""

from __future__ import annotations

import asyncio

import structlog

from controlplane.errors import StateUnavailable
from controlplane.intents.repository import IntentRepository
from controlplane.storage.file_store import FileStore

log = structlog.get_logger("tidevoy.replicas")

_RETRY_SECONDS = 5.0  # seconds after a write that failed


class LocalIntentsBackup:
    """Written soon after each change. One that fails is tried again; nobody waits for it."""

    def __init__(self, local_store: FileStore, intents: IntentRepository) -> None:
        self._local_store = local_store
        self._intents = intents
        self._changed = asyncio.Event()
        self._changed.set()

    def notify_changed(self) -> None:
        """Others are in force."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._changed.wait()
            if not await self.save():
                await asyncio.sleep(_RETRY_SECONDS)

    async def save(self) -> bool:
        """Write them unless they are there already; whether they are now."""
        self._changed.clear()
        on_disk = await self._local_store.read_intents()
        if on_disk.version and on_disk.value == self._intents.current:
            return True
        try:
            await self._local_store.save_intents(self._intents.current, on_disk.version)
        except StateUnavailable as error:
            log.warning("what operators asked for could not be copied", error=str(error))
            self._changed.set()
            return False
        return True

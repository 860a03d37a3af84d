"""Backup of the intents on the local disk, so that a start without PD keeps drained nodes drained."""

from __future__ import annotations

import asyncio

import structlog

from controlplane.errors import StateUnavailable
from controlplane.intents.repository import IntentRepository
from controlplane.storage.file_store import FileStore

log = structlog.get_logger("tidevoy.replicas")

_RETRY_SECONDS = 5.0


class LocalIntentsBackup:
    """Writes the intents soon after each change, and retries failed writes in the background."""

    def __init__(self, local_store: FileStore, intents: IntentRepository) -> None:
        self._local_store = local_store
        self._intents = intents
        self._changed = asyncio.Event()
        self._changed.set()

    def notify_changed(self) -> None:
        """Request a write: the intents have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Write after each change until cancelled."""
        while True:
            await self._changed.wait()
            if not await self.save():
                await asyncio.sleep(_RETRY_SECONDS)

    async def save(self) -> bool:
        """Write the intents unless the backup is current; return whether it is current now."""
        self._changed.clear()
        on_disk = await self._local_store.read_intents()
        if on_disk.version and on_disk.value == self._intents.current:
            return True
        try:
            await self._local_store.save_intents(self._intents.current, on_disk.version)
        except StateUnavailable as error:
            log.warning("could not write the local backup of the intents", error=str(error))
            self._changed.set()
            return False
        return True

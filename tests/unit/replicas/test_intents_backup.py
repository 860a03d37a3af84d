"""The copy of the intents on the local disk: a failed read or write is counted and tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import StateUnavailable
from controlplane.intents.changes import drain
from controlplane.intents.repository import IntentRepository
from controlplane.model.intents import Intents
from controlplane.replicas.replica_set import LocalIntentsBackup
from controlplane.storage import debounced_writer
from controlplane.storage.file_store import FileStore
from controlplane.storage.store import Versioned
from tests.support.controlplane.running_xds import RecordedEvents
from tests.support.waiting import wait_until


class LocalStore:
    """Holds intents. Its first `failed_reads` reads raise StateUnavailable."""

    def __init__(self, failed_reads: int) -> None:
        self.stored = Versioned(Intents())
        self.failed_reads = failed_reads

    async def read_intents(self) -> Versioned[Intents]:
        if self.failed_reads:
            self.failed_reads -= 1
            raise StateUnavailable("intents.json", "input/output error")
        return self.stored

    async def save_intents(self, intents: Intents, version: int) -> int:
        self.stored = Versioned(intents, version + 1)
        return version + 1


async def test_intents_are_copied_after_a_failed_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(debounced_writer, "_MIN_RETRY_SECONDS", 0.01)
    local_store = LocalStore(failed_reads=2)
    intents = IntentRepository(FileStore(tmp_path), RecordedEvents())
    failures = Counter("failures", "", registry=CollectorRegistry())
    backup = LocalIntentsBackup(cast(FileStore, local_store), intents, failures)
    running = asyncio.create_task(backup.run())
    try:
        await wait_until(lambda: local_store.stored == Versioned(Intents(), 1))
        assert failures._value.get() == 2
        drained = drain(Intents(), "a:1", 1.0, 600.0)
        intents.accept(Versioned(drained, 7))
        await wait_until(lambda: local_store.stored == Versioned(drained, 2))
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()

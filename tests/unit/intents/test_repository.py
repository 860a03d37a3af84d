"""Changes of intents while another control plane writes too."""

from __future__ import annotations

import asyncio

from controlplane.errors import VersionConflict
from controlplane.intents.changes import drain
from controlplane.intents.repository import IntentRepository
from controlplane.model.intents import Intents
from controlplane.storage.store import Versioned
from tests.support.controlplane.running_xds import RecordedEvents


class SharedStore:
    """A store to which another control plane also writes. A read returns the content at the read's start."""

    def __init__(self) -> None:
        self.stored = Versioned(Intents(), 1)
        self.read_started = asyncio.Event()
        self.may_respond = asyncio.Event()

    async def save_intents(self, intents: Intents, version: int) -> int:
        if version != self.stored.version:
            raise VersionConflict("the intents")
        self.stored = Versioned(intents, version + 1)
        return self.stored.version

    async def read_intents(self) -> Versioned[Intents]:
        stored = self.stored
        self.read_started.set()
        await self.may_respond.wait()
        return stored

    def drain_by_other(self, address: str) -> Versioned[Intents]:
        """Drain a node on behalf of the other control plane."""
        self.stored = Versioned(drain(self.stored.value, address, 1.0, 600.0), self.stored.version + 1)
        return self.stored


async def test_late_read_does_not_revert_newer_intents() -> None:
    store = SharedStore()
    events = RecordedEvents()
    repository = IntentRepository(store, events)  # type: ignore[arg-type]
    repository.restore(store.stored)
    store.drain_by_other("a:1")
    change = asyncio.create_task(repository.change(lambda now: drain(now, "c:1", 1.0, 600.0)))
    await store.read_started.wait()
    repository.accept(store.drain_by_other("b:1"))  # received before the response to the earlier read
    store.may_respond.set()
    version = await change
    assert [event[:2] for event in events.recorded] == [
        ("intent.drain", "a:1"),
        ("intent.drain", "b:1"),
        ("intent.drain", "c:1"),
    ]
    assert store.stored == Versioned(repository.current, version)

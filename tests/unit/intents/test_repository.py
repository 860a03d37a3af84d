"""Changes of intents while another control plane writes too."""

from __future__ import annotations

import asyncio

from controlplane.errors import VersionConflict
from controlplane.intents.changes import drain
from controlplane.intents.repository import IntentRepository
from controlplane.model.intents import Intents
from controlplane.storage.store import Versioned


class SharedStore:
    """A store that another control plane writes to as well. Reads are delayed and return old content."""

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
    drains_in_force: list[set[str]] = []
    repository = IntentRepository(
        store,  # type: ignore[arg-type]
        lambda before, by_operator: drains_in_force.append(set(repository.current.drains)),
    )
    repository.restore(store.stored)
    store.drain_by_other("a:1")
    change = asyncio.create_task(repository.change(lambda now: drain(now, "c:1", 1.0, 600.0)))
    await store.read_started.wait()
    repository.accept(store.drain_by_other("b:1"))  # received before the response to the earlier read
    store.may_respond.set()
    version = await change
    assert drains_in_force == [{"a:1", "b:1"}, {"a:1", "b:1", "c:1"}]
    assert store.stored == Versioned(repository.current, version)

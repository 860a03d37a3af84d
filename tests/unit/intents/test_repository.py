"""A step on what operators asked for, while others write too."""

from __future__ import annotations

import asyncio

from controlplane.errors import VersionConflict
from controlplane.intents.changes import drain
from controlplane.intents.repository import IntentRepository
from controlplane.model.intents import Intents
from controlplane.storage.store import Versioned


class Shared:
    """A store in which another control plane writes, too. It tells what it held when it was asked."""

    def __init__(self) -> None:
        self.kept = Versioned(Intents(), 1)
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def save_intents(self, intents: Intents, version: int) -> int:
        if version != self.kept.version:
            raise VersionConflict("the intents")
        self.kept = Versioned(intents, version + 1)
        return self.kept.version

    async def read_intents(self) -> Versioned[Intents]:
        kept = self.kept
        self.asked.set()
        await self.answers.wait()
        return kept

    def drained(self, address: str) -> Versioned[Intents]:
        """Another one drains a node."""
        self.kept = Versioned(drain(self.kept.value, address, 1.0, 600.0), self.kept.version + 1)
        return self.kept


async def test_an_answer_that_comes_late_takes_nothing_back() -> None:
    shared = Shared()
    in_force: list[set[str]] = []
    intentions = IntentRepository(
        shared,  # type: ignore[arg-type]
        lambda before, by_operator: in_force.append(set(intentions.current.drains)),
    )
    intentions.restore(shared.kept)
    shared.drained("a:1")
    changing = asyncio.create_task(intentions.change(lambda now: drain(now, "c:1", 1.0, 600.0)))
    await shared.asked.wait()
    intentions.accept(shared.drained("b:1"))  # heard of before the answer to what was asked earlier
    shared.answers.set()
    version = await changing
    assert in_force == [{"a:1", "b:1"}, {"a:1", "b:1", "c:1"}]
    assert shared.kept == Versioned(intentions.current, version)

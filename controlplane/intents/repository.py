"""The intents that are in force, and the one way to change them: as a step that is kept before it counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from controlplane.aio import uninterrupted
from controlplane.errors import Superseded
from controlplane.model.intents import Intents
from controlplane.storage.store import Store, Versioned

Step = Callable[[Intents], Intents]  # pure, and may be asked again; raises when the step is not to be taken

# Seconds for which a step is tried again and again when others were there before; and how long it is waited
# at most in between, so that nobody loses all the time.
_PATIENCE, _PAUSE = 3.0, 0.03


class Intentions:
    """What operators asked for. `on_change` gets what was in force before, and whether an operator asked."""

    def __init__(self, store: Store, on_change: Callable[[Intents, bool], None]) -> None:
        self._store = store
        self._on_change = on_change
        self._kept = Versioned(Intents())
        self._changing = asyncio.Lock()

    @property
    def now(self) -> Intents:
        """Those in force."""
        return self._kept.value

    @property
    def version(self) -> int:
        """Of those in force."""
        return self._kept.version

    def restore(self, kept: Versioned[Intents]) -> None:
        """Begin with what was kept; nobody is told."""
        self._kept = kept

    def take(self, kept: Versioned[Intents]) -> None:
        """What is kept now, whoever wrote it. What is older than what is in force is passed over."""
        if kept.version > self._kept.version:
            self._enforce(kept, by_operator=True)

    async def change(self, step: Step, *, by_operator: bool = True) -> int:
        """Keep the outcome of a step, then act on it; the version with which it is in force.

        A step that changes nothing is not kept. What the step raises; StateUnavailable, Superseded: then
        nothing has changed. Also when the caller is cancelled, what is kept and what is in force are never
        two things.
        """
        async with self._changing:
            return await uninterrupted(self._change(step, by_operator))

    async def _change(self, step: Step, by_operator: bool) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        while True:
            wanted = step(self._kept.value)
            if wanted == self._kept.value:
                return self._kept.version
            try:
                version = await self._store.save_intents(wanted, self._kept.version)
            except Superseded:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(random.uniform(0, _PAUSE))
                known = self._kept.version
                kept = await self._store.read_intents()
                if self._kept.version == known:  # else we have heard meanwhile of what may be later still
                    self._look_again(kept)
                continue
            if version > self._kept.version:  # else it has been heard of already, and maybe of a later one
                self._enforce(Versioned(wanted, version), by_operator=by_operator)
            return version

    def _look_again(self, kept: Versioned[Intents]) -> None:
        """What is kept in fact. Where nothing is, a hand has deleted it: what is in force stays."""
        if kept.version:
            self._enforce(kept, by_operator=True)
        else:
            self._kept = Versioned(self._kept.value)

    def _enforce(self, kept: Versioned[Intents], *, by_operator: bool) -> None:
        before, self._kept = self._kept.value, kept
        self._on_change(before, by_operator)

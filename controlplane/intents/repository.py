"""The intents that are in force, and the one way to change them: as a step that is kept before it counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from controlplane.aio import run_to_completion
from controlplane.errors import VersionConflict
from controlplane.model.intents import Intents
from controlplane.storage.store import Store, Versioned

IntentChange = Callable[
    [Intents], Intents
]  # pure, and may be asked again; raises when the step is not to be taken

# Seconds for which a step is tried again and again when others were there before; and how long it is waited
# at most in between, so that nobody loses all the time.
_RETRY_TIMEOUT_SECONDS, _MAX_RETRY_DELAY_SECONDS = 3.0, 0.03


class IntentRepository:
    """What operators asked for. `on_change` gets what was in force before, and whether an operator asked."""

    def __init__(self, store: Store, on_change: Callable[[Intents, bool], None]) -> None:
        self._store = store
        self._on_change = on_change
        self._stored = Versioned(Intents())
        self._change_lock = asyncio.Lock()

    @property
    def current(self) -> Intents:
        """Those in force."""
        return self._stored.value

    @property
    def version(self) -> int:
        """Of those in force."""
        return self._stored.version

    def restore(self, stored: Versioned[Intents]) -> None:
        """Begin with what was kept; nobody is told."""
        self._stored = stored

    def accept(self, stored: Versioned[Intents]) -> None:
        """What is kept now, whoever wrote it. What is older than what is in force is passed over."""
        if stored.version > self._stored.version:
            self._activate(stored, by_operator=True)

    async def change(self, apply_change: IntentChange, *, by_operator: bool = True) -> int:
        """Keep the outcome of a step, then act on it; the version with which it is in force.

        A step that changes nothing is not kept. What the step raises; StateUnavailable, Superseded: then
        nothing has changed. Also when the caller is cancelled, what is kept and what is in force are never
        two things.
        """
        async with self._change_lock:
            return await run_to_completion(self._change(apply_change, by_operator))

    async def _change(self, apply_change: IntentChange, by_operator: bool) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RETRY_TIMEOUT_SECONDS
        while True:
            changed = apply_change(self._stored.value)
            if changed == self._stored.value:
                return self._stored.version
            try:
                version = await self._store.save_intents(changed, self._stored.version)
            except VersionConflict:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(random.uniform(0, _MAX_RETRY_DELAY_SECONDS))
                known_version = self._stored.version
                stored = await self._store.read_intents()
                if (
                    self._stored.version == known_version
                ):  # else we have heard meanwhile of what may be later still
                    self._accept_stored(stored)
                continue
            if version > self._stored.version:  # else it has been heard of already, and maybe of a later one
                self._activate(Versioned(changed, version), by_operator=by_operator)
            return version

    def _accept_stored(self, stored: Versioned[Intents]) -> None:
        """What is kept in fact. Where nothing is, a hand has deleted it: what is in force stays."""
        if stored.version:
            self._activate(stored, by_operator=True)
        else:
            self._stored = Versioned(self._stored.value)

    def _activate(self, stored: Versioned[Intents], *, by_operator: bool) -> None:
        before, self._stored = self._stored.value, stored
        self._on_change(before, by_operator)

"""The intents in force, and the only way to change them: each change is saved before it takes effect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from controlplane.aio import run_to_completion
from controlplane.errors import VersionConflict
from controlplane.model.intents import Intents
from controlplane.storage.store import Store, Versioned

# A pure function that may be called several times; it raises if the change is not permitted.
IntentChange = Callable[[Intents], Intents]

# How long a change is retried after version conflicts with other replicas. The delay between attempts is
# random, up to the maximum, so that no replica loses every time.
_RETRY_TIMEOUT_SECONDS, _MAX_RETRY_DELAY_SECONDS = 3.0, 0.03


class IntentRepository:
    """The intents in force. `on_change` gets the previous intents and whether an operator changed them."""

    def __init__(self, store: Store, on_change: Callable[[Intents, bool], None]) -> None:
        self._store = store
        self._on_change = on_change
        self._stored = Versioned(Intents())
        self._change_lock = asyncio.Lock()

    @property
    def current(self) -> Intents:
        """The intents in force."""
        return self._stored.value

    @property
    def version(self) -> int:
        """The version of the intents in force."""
        return self._stored.version

    def restore(self, stored: Versioned[Intents]) -> None:
        """Start from saved intents, without calling `on_change`."""
        self._stored = stored

    def accept(self, stored: Versioned[Intents]) -> None:
        """Activate intents read from the store, unless they are older than those in force."""
        if stored.version > self._stored.version:
            self._activate(stored, by_operator=True)

    async def change(self, apply_change: IntentChange, *, by_operator: bool = True) -> int:
        """Save the result of a change, then activate it; return the version of the intents in force.

        A change without effect is not saved. Raises StateUnavailable, VersionConflict, and whatever
        `apply_change` raises; then nothing has changed. Cancelling the caller does not leave the saved
        intents different from those in force.
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
                # Otherwise `accept` has meanwhile activated intents that may be newer than those just read.
                if self._stored.version == known_version:
                    self._accept_stored(stored)
                continue
            # Otherwise `accept` has already activated these intents or newer ones.
            if version > self._stored.version:
                self._activate(Versioned(changed, version), by_operator=by_operator)
            return version

    def _accept_stored(self, stored: Versioned[Intents]) -> None:
        """Activate what the store holds. If someone deleted it there, the intents in force stay."""
        if stored.version:
            self._activate(stored, by_operator=True)
        else:
            self._stored = Versioned(self._stored.value)

    def _activate(self, stored: Versioned[Intents], *, by_operator: bool) -> None:
        before, self._stored = self._stored.value, stored
        self._on_change(before, by_operator)

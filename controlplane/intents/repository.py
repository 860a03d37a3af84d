"""The current intents of operators. Each change is saved before it takes effect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import intent_events
from controlplane.model.intents import Intents
from controlplane.storage.store import Store, Versioned, compare_and_set

# A pure function that may be called again after a conflict. It raises if the change is not permitted.
IntentChange = Callable[[Intents], Intents]


class IntentRepository:
    """The current intents. After a change, the caller must call `Planner.decide`."""

    def __init__(self, store: Store, events: EventLog) -> None:
        self._store = store
        self._events = events
        self._stored = Versioned(Intents())
        self._change_lock = asyncio.Lock()
        self.needs_local_backup = asyncio.Event()
        """Set when the intents have changed; a replica's backup of them on the local disk clears it."""

    @property
    def current(self) -> Intents:
        return self._stored.value

    @property
    def version(self) -> int:
        return self._stored.version

    def restore(self, stored: Versioned[Intents]) -> None:
        """Start from saved intents; no events are emitted."""
        self._stored = stored

    def accept(self, stored: Versioned[Intents]) -> None:
        """Activate intents that were read from the store if they are newer than the current ones."""
        if stored.version > self._stored.version:
            self._activate(stored, by_operator=True)

    async def change(self, apply_change: IntentChange, *, by_operator: bool = True) -> int:
        """Apply a change, save the result, then activate it; return the version of the current intents.

        A change without effect is not saved. With `by_operator`, events are emitted. Raises StateUnavailable,
        VersionConflict, and the errors of `apply_change`; after an error, this change is not active. Must not
        be cancelled, since the current intents might then differ from the saved intents.
        """
        async with self._change_lock:
            return await self._change(apply_change, by_operator)

    async def _change(self, apply_change: IntentChange, by_operator: bool) -> int:
        async def save() -> int:
            changed = apply_change(self._stored.value)
            if changed == self._stored.value:
                return self._stored.version
            version = await self._store.save_intents(changed, self._stored.version)
            # If the version is not newer, `accept` has already activated these intents or newer ones.
            if version > self._stored.version:
                self._activate(Versioned(changed, version), by_operator=by_operator)
            return version

        return await compare_and_set(save, self._reload)

    async def _reload(self) -> None:
        """Activate the stored intents. If they were deleted from the store, the current intents stay."""
        known_version = self._stored.version
        stored = await self._store.read_intents()
        if self._stored.version != known_version:
            return  # during the read, `accept` activated intents that may be newer
        if not stored.version:
            self._stored = Versioned(self._stored.value)
        elif stored.version != known_version:
            self._activate(stored, by_operator=True)

    def _activate(self, stored: Versioned[Intents], *, by_operator: bool) -> None:
        before, self._stored = self._stored.value, stored
        self.needs_local_backup.set()
        if by_operator:
            for draft in intent_events(before, stored.value):
                self._events.emit(*draft)

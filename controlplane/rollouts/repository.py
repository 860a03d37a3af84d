"""The stored rollouts. A change takes effect only after it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.errors import StateUnavailable, UnknownRollout, VersionConflict
from controlplane.model.rollout import Rollout
from controlplane.rollouts import state_machine
from controlplane.storage.store import Store, Versioned, compare_and_set

# A pure function that may be called more than once; it raises if the transition is not allowed.
Transition = Callable[[Rollout], Rollout]

_MAX_ENDED_ROLLOUTS = 20


class RolloutRepository:
    """All stored rollouts. `on_change` gets the records before (None if new) and after a change."""

    def __init__(
        self, store: Store, clock: Clock, on_change: Callable[[Rollout | None, Rollout], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._stored: dict[str, Versioned[Rollout]] = {}
        self._change_lock = asyncio.Lock()

    def all(self) -> list[Rollout]:
        """Return all rollouts, latest first."""
        rollouts = [stored.value for stored in self._stored.values()]
        return sorted(rollouts, key=lambda rollout: (rollout.created_at, rollout.id), reverse=True)

    def active(self) -> list[Rollout]:
        """Return the rollouts that are not over, oldest first."""
        return [rollout for rollout in reversed(self.all()) if not rollout.phase.is_over]

    def get(self, rollout_id: str) -> Rollout:
        """Return one rollout. Raises UnknownRollout."""
        if rollout_id not in self._stored:
            raise UnknownRollout(rollout_id)
        return self._stored[rollout_id].value

    def restore(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Load the stored rollouts at the start, without notifications."""
        now = self._clock()
        self._stored = {
            name: Versioned(state_machine.clamp_timestamps(record.value, now), record.version)
            for name, record in stored.items()
        }

    def apply_stored(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Apply rollouts that any control plane has stored. Versions older than the known ones are ignored.

        A missing rollout is deleted only if it is over: an active one may be newer than `stored`.
        """
        missing = self._stored.keys() - stored.keys()
        for name in [name for name in missing if self._stored[name].value.phase.is_over]:
            del self._stored[name]
        for record in stored.values():
            self._apply(record)

    async def create(self, rollout: Rollout) -> None:
        """Store a new rollout. Raises StateUnavailable, or VersionConflict if the id exists."""
        async with self._change_lock:
            save, reload = partial(self._save, rollout, 0, None), partial(self._reload, rollout.id)
            await run_to_completion(compare_and_set(save, reload, retry_seconds=0))

    async def change(self, rollout_id: str, transition: Transition, term: int | None = None) -> Rollout:
        """Store the result of a transition, and return the record that is in force after it.

        With a `term`, store it only while this control plane leads in that term. Raises what the transition
        raises, UnknownRollout, StateUnavailable, VersionConflict or NotLeader. Even if the caller is
        cancelled, the record in memory equals the stored one, unless the store cannot be read.
        """

        async def save() -> None:
            before = self.get(rollout_id)
            after = transition(before)
            if after is not before and after != before:
                await self._save(after, self._stored[rollout_id].version, term)

        async with self._change_lock:
            await run_to_completion(compare_and_set(save, partial(self._reload, rollout_id)))
        return self.get(rollout_id)

    async def delete_old(self) -> None:
        """Delete the oldest ended rollouts beyond the limit. A failure is retried in a later call."""
        ended = [rollout for rollout in self.all() if rollout.phase.is_over]
        for rollout in ended[_MAX_ENDED_ROLLOUTS:]:
            async with self._change_lock:
                stored = self._stored.get(rollout.id)
                if stored is None:
                    continue
                delete = partial(self._store.delete_rollout, rollout.id, stored.version)
                try:
                    await compare_and_set(delete, partial(self._reload, rollout.id), retry_seconds=0)
                except (StateUnavailable, VersionConflict):
                    return
                self._stored.pop(rollout.id, None)

    async def _reload(self, rollout_id: str) -> None:
        """Load a record that another writer changed. Raises StateUnavailable, and then changes nothing."""
        stored = await self._store.read_rollout(rollout_id)
        if stored is not None:
            self._apply(stored)
        else:
            self._stored.pop(rollout_id, None)

    async def _save(self, rollout: Rollout, version: int, term: int | None) -> None:
        self._apply(Versioned(rollout, await self._store.save_rollout(rollout, version, term)))

    def _apply(self, stored: Versioned[Rollout]) -> None:
        before = self._stored.get(stored.value.id)
        if before is not None and before.version >= stored.version:
            return  # older than the record in memory, or already applied during the write
        rollout = state_machine.clamp_timestamps(stored.value, self._clock())
        self._stored[rollout.id] = Versioned(rollout, stored.version)
        self._on_change(before.value if before is not None else None, rollout)

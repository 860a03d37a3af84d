"""The stored rollouts. A change takes effect only after it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.errors import StateUnavailable, UnknownRollout, VersionConflict
from controlplane.model.rollout import Rollout
from controlplane.rollouts import state_machine
from controlplane.storage.store import Store, Versioned

# A pure function that may be called more than once; it raises if the transition is not allowed.
Transition = Callable[[Rollout], Rollout]

_MAX_ENDED_ROLLOUTS = 20
# After this many version conflicts in a row the conflict is raised.
_MAX_CHANGE_ATTEMPTS = 10


class RolloutRepository:
    """All stored rollouts. `on_change` gets a record before (None if it is new) and after each change."""

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
        return sorted(rollouts, key=lambda rollout: (rollout.created, rollout.id), reverse=True)

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

    def accept(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Apply the stored rollouts of any writer. Versions older than the known ones are ignored.

        A missing rollout is deleted only if it is over: an active one may be newer than this view.
        """
        missing = self._stored.keys() - stored.keys()
        for name in [name for name in missing if self._stored[name].value.phase.is_over]:
            del self._stored[name]
        for record in stored.values():
            self._accept_one(record)

    async def create(self, rollout: Rollout) -> None:
        """Store a new rollout. Raises StateUnavailable, or VersionConflict if the id exists."""
        async with self._change_lock:
            await run_to_completion(self._save(rollout, 0, None))

    async def change(self, rollout_id: str, transition: Transition, term: int | None = None) -> Rollout:
        """Store the result of a transition and return the record then in force.

        With a `term`, only while this control plane leads in it. Raises what the transition raises,
        UnknownRollout, StateUnavailable, VersionConflict or NotLeader; then nothing has changed. Even if the
        caller is cancelled, the record in memory equals the stored one.
        """
        async with self._change_lock:
            for attempts_left in reversed(range(_MAX_CHANGE_ATTEMPTS)):
                before = self.get(rollout_id)
                after = transition(before)
                if after is before or after == before:
                    break
                try:
                    await run_to_completion(self._save(after, self._stored[rollout_id].version, term))
                    break
                except VersionConflict:
                    if not attempts_left:
                        raise
                    await self._reload(rollout_id)
        return self.get(rollout_id)

    async def forget_old(self) -> None:
        """Delete the oldest ended rollouts beyond the limit. A failure is retried in a later call."""
        ended = [rollout for rollout in self.all() if rollout.phase.is_over]
        for rollout in ended[_MAX_ENDED_ROLLOUTS:]:
            async with self._change_lock:
                stored = self._stored.get(rollout.id)
                if stored is None:
                    continue
                try:
                    await self._store.forget_rollout(rollout.id, stored.version)
                except (StateUnavailable, VersionConflict):
                    return
                self._stored.pop(rollout.id, None)

    async def _reload(self, rollout_id: str) -> None:
        """Read a record that another writer changed. Raises StateUnavailable; then nothing has changed."""
        stored = await self._store.read_rollout(rollout_id)
        if stored is not None:
            self._accept_one(stored)
        else:
            self._stored.pop(rollout_id, None)

    def _accept_one(self, stored: Versioned[Rollout]) -> None:
        known = self._stored.get(stored.value.id)
        if known is None or stored.version > known.version:
            self._activate(state_machine.clamp_timestamps(stored.value, self._clock()), stored.version)

    async def _save(self, rollout: Rollout, version: int, term: int | None) -> None:
        self._activate(rollout, await self._store.save_rollout(rollout, version, term))

    def _activate(self, rollout: Rollout, version: int) -> None:
        before = self._stored.get(rollout.id)
        if before is not None and before.version >= version:
            return  # the store delivered it during the write
        self._stored[rollout.id] = Versioned(rollout, version)
        self._on_change(before.value if before is not None else None, rollout)

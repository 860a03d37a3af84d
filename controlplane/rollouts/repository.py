"""The rollouts as they are kept, and the one way to change one: as a step that is kept before it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.errors import StateUnavailable, UnknownRollout, VersionConflict
from controlplane.model.rollout import Rollout
from controlplane.rollouts import state_machine
from controlplane.storage.store import Store, Versioned

Transition = Callable[
    [Rollout], Rollout
]  # pure, and may be asked again; raises when the step is not to be taken

_MAX_ENDED_ROLLOUTS = 20
# Somebody else was there before, so many times in a row: then the caller is told so.
_MAX_CHANGE_ATTEMPTS = 10


class RolloutRepository:
    """All rollouts that are not forgotten. `on_change` gets a record before (None: it is new) and after."""

    def __init__(
        self, store: Store, clock: Clock, on_change: Callable[[Rollout | None, Rollout], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._stored: dict[str, Versioned[Rollout]] = {}
        self._change_lock = asyncio.Lock()

    def all(self) -> list[Rollout]:
        """Latest first."""
        rollouts = [kept.value for kept in self._stored.values()]
        return sorted(rollouts, key=lambda rollout: (rollout.created, rollout.id), reverse=True)

    def active(self) -> list[Rollout]:
        """Those that are not over, oldest first."""
        return [rollout for rollout in reversed(self.all()) if not rollout.phase.is_over]

    def get(self, rollout_id: str) -> Rollout:
        """One of them. UnknownRollout."""
        if rollout_id not in self._stored:
            raise UnknownRollout(rollout_id)
        return self._stored[rollout_id].value

    def restore(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Begin with what was kept; nobody is told."""
        now = self._clock()
        self._stored = {
            name: Versioned(state_machine.clamp_timestamps(each.value, now), each.version)
            for name, each in stored.items()
        }

    def accept(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """What is kept now, whoever wrote it. What is older than what is known is passed over.

        What is missing there may be younger than this view of the store, unless it is over.
        """
        for name in [n for n, each in self._stored.items() if each.value.phase.is_over and n not in stored]:
            del self._stored[name]
        for each in stored.values():
            self._accept_one(each)

    async def create(self, rollout: Rollout) -> None:
        """Keep a new one. StateUnavailable, Superseded: there is one with that id."""
        async with self._change_lock:
            await run_to_completion(self._save(rollout, 0, None))

    async def change(self, rollout_id: str, transition: Transition, term: int | None = None) -> Rollout:
        """Keep the outcome of a step; the record that is in force then.

        With a `term`, only as long as this control plane leads in it. What the step raises; UnknownRollout,
        StateUnavailable, Superseded, NotLeading: then nothing has changed. Also when the caller is cancelled,
        what is kept and what is in force are never two things.
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
        """Forget the oldest of those that are over when there are many. What fails is tried again later."""
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
        """Read what somebody else has made of a record. StateUnavailable: it stays as it was known."""
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
            return  # it came from the store while it was being written
        self._stored[rollout.id] = Versioned(rollout, version)
        self._on_change(before.value if before is not None else None, rollout)

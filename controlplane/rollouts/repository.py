"""The rollouts as they are kept, and the one way to change one: as a step that is kept before it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from controlplane.aio import uninterrupted
from controlplane.clock import Clock
from controlplane.errors import StateUnavailable, Superseded, UnknownRollout
from controlplane.model.rollout import Rollout
from controlplane.rollouts import state_machine
from controlplane.storage.store import Store, Versioned

Step = Callable[[Rollout], Rollout]  # pure, and may be asked again; raises when the step is not to be taken

_MOST_ENDED = 20
# Somebody else was there before, so many times in a row: then the caller is told so.
_TRIES = 10


class Records:
    """All rollouts that are not forgotten. `on_change` gets a record before (None: it is new) and after."""

    def __init__(
        self, store: Store, clock: Clock, on_change: Callable[[Rollout | None, Rollout], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._kept: dict[str, Versioned[Rollout]] = {}
        self._changing = asyncio.Lock()

    def all(self) -> list[Rollout]:
        """Latest first."""
        known = [kept.value for kept in self._kept.values()]
        return sorted(known, key=lambda rollout: (rollout.created, rollout.id), reverse=True)

    def live(self) -> list[Rollout]:
        """Those that are not over, oldest first."""
        return [rollout for rollout in reversed(self.all()) if not rollout.phase.is_over]

    def get(self, name: str) -> Rollout:
        """One of them. UnknownRollout."""
        if name not in self._kept:
            raise UnknownRollout(name)
        return self._kept[name].value

    def restore(self, kept: Mapping[str, Versioned[Rollout]]) -> None:
        """Begin with what was kept; nobody is told."""
        now = self._clock()
        self._kept = {
            name: Versioned(state_machine.until(each.value, now), each.version) for name, each in kept.items()
        }

    def take(self, kept: Mapping[str, Versioned[Rollout]]) -> None:
        """What is kept now, whoever wrote it. What is older than what is known is passed over.

        What is missing there may be younger than this view of the store, unless it is over.
        """
        for name in [n for n, each in self._kept.items() if each.value.phase.is_over and n not in kept]:
            del self._kept[name]
        for each in kept.values():
            self._adopt(each)

    async def create(self, rollout: Rollout) -> None:
        """Keep a new one. StateUnavailable, Superseded: there is one with that id."""
        async with self._changing:
            await uninterrupted(self._save(rollout, 0, None))

    async def change(self, name: str, step: Step, term: int | None = None) -> Rollout:
        """Keep the outcome of a step; the record that is in force then.

        With a `term`, only as long as this control plane leads in it. What the step raises; UnknownRollout,
        StateUnavailable, Superseded, NotLeading: then nothing has changed. Also when the caller is cancelled,
        what is kept and what is in force are never two things.
        """
        async with self._changing:
            for left in reversed(range(_TRIES)):
                before = self.get(name)
                wanted = step(before)
                if wanted is before or wanted == before:
                    break
                try:
                    await uninterrupted(self._save(wanted, self._kept[name].version, term))
                    break
                except Superseded:
                    if not left:
                        raise
                    await self._catch_up(name)
        return self.get(name)

    async def forget_old(self) -> None:
        """Forget the oldest of those that are over when there are many. What fails is tried again later."""
        over = [rollout for rollout in self.all() if rollout.phase.is_over]
        for rollout in over[_MOST_ENDED:]:
            async with self._changing:
                kept = self._kept.get(rollout.id)
                if kept is None:
                    continue
                try:
                    await self._store.forget_rollout(rollout.id, kept.version)
                except (StateUnavailable, Superseded):
                    return
                self._kept.pop(rollout.id, None)

    async def _catch_up(self, name: str) -> None:
        """Read what somebody else has made of a record. StateUnavailable: it stays as it was known."""
        kept = await self._store.read_rollout(name)
        if kept is not None:
            self._adopt(kept)
        else:
            self._kept.pop(name, None)

    def _adopt(self, kept: Versioned[Rollout]) -> None:
        known = self._kept.get(kept.value.id)
        if known is None or kept.version > known.version:
            self._enforce(state_machine.until(kept.value, self._clock()), kept.version)

    async def _save(self, rollout: Rollout, version: int, term: int | None) -> None:
        self._enforce(rollout, await self._store.save_rollout(rollout, version, term))

    def _enforce(self, rollout: Rollout, version: int) -> None:
        before = self._kept.get(rollout.id)
        if before is not None and before.version >= version:
            return  # it came from the store while it was being written
        self._kept[rollout.id] = Versioned(rollout, version)
        self._on_change(before.value if before is not None else None, rollout)

"""The interface between the engine and storage: what survives restarts, and who may change it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from controlplane.errors import StateUnavailable, VersionConflict
from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import Plan, Stamp
from controlplane.model.rollout import Rollout

T = TypeVar("T")

# How long a change is retried after version conflicts with other replicas. The delay between attempts is
# random, up to the maximum, so that no replica loses every time.
_RETRY_TIMEOUT_SECONDS, _MAX_RETRY_DELAY_SECONDS = 3.0, 0.03


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A value with the version of its last write; the version 0 means that it was never written."""

    value: T
    version: int = 0


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The last plan, with what is needed to continue from it."""

    plan: Plan
    envoys: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # Envoy id -> last seen (Unix s)
    intents_version: int = 0  # version of the intents that the plan applies
    term: int = 0  # of the leader that computed it; 0 if no leader did
    serial: int = 0  # increases with each plan of a term

    @property
    def stamp(self) -> Stamp:
        return (self.term, self.serial)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state loaded from a store."""

    intents: Versioned[Intents]
    plan: SavedPlan | None
    rollouts: Mapping[str, Versioned[Rollout]] = field(default_factory=lambda: EMPTY_MAP)  # by id
    load_errors: tuple[str, ...] = ()  # what is unusable and why, a sentence each


class Store(Protocol):
    """Intents, rollouts and the last plan. All reads and writes must be inside `lock()`.

    A `save_` method with a `version` replaces only this version (0: the value must not exist) and returns the
    new version. It raises VersionConflict if a concurrent write came first, and StateUnavailable if it could
    not write. After StateUnavailable nothing has changed, unless `is_certain` of the error is false. With a
    `term`, the method writes only while this replica leads in that term; otherwise it raises NotLeader.
    A `read_` method reads a value that a change replaces. It raises StateUnavailable if it could not read.
    """

    def lock(self) -> AbstractAsyncContextManager[None]:
        """Open the store while the block runs. Raises ConfigError if it cannot be opened."""
        ...

    async def load(self) -> LoadedState:
        """Return all saved state. Raises ConfigError if it is unreadable."""
        ...

    async def read_intents(self) -> Versioned[Intents]:
        """Return the saved intents. Raises StateUnavailable."""
        ...

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Replace the intents. Raises StateUnavailable or VersionConflict."""
        ...

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """Return the rollout with the id `name`, or None if there is none. Raises StateUnavailable."""
        ...

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Save a rollout. Raises StateUnavailable, VersionConflict or NotLeader."""
        ...

    async def delete_rollout(self, name: str, version: int) -> None:
        """Delete the rollout with the id `name`. Raises StateUnavailable or VersionConflict."""
        ...

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the plan; `saved.term` is this replica's term. Raises NotLeader or StateUnavailable."""
        ...


async def compare_and_set(
    save: Callable[[], Awaitable[T]],
    reload: Callable[[], Awaitable[None]],
    *,
    retry_seconds: float = _RETRY_TIMEOUT_SECONDS,
) -> T:
    """Save a change that replaces a known version; after a concurrent write, reload and save again.

    `save` applies the change to the known version and saves it; `reload` reads the version in the store.
    Raises VersionConflict after `retry_seconds`, and whatever `save` and `reload` raise. If `save` fails with
    unknown outcome, the state is reloaded before that error is raised.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + retry_seconds
    while True:
        try:
            return await save()
        except VersionConflict:
            if loop.time() >= deadline:
                raise
        except StateUnavailable as error:
            if not error.is_certain:
                with suppress(StateUnavailable):
                    await reload()
            raise
        await asyncio.sleep(random.uniform(0, _MAX_RETRY_DELAY_SECONDS))
        await reload()

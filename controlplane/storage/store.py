"""The interface between the engine and storage: what survives restarts, and who may change it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import Plan, Stamp
from controlplane.model.rollout import Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A value with the version of its last write; 0: never written."""

    value: T
    version: int = 0


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The last plan, with what is needed to continue from it."""

    plan: Plan
    envoys: Mapping[str, float] = field(default_factory=lambda: EMPTY_MAP)  # Envoy id -> last seen (Unix s)
    intents_version: int = 0  # of the intents that it applies
    term: int = 0  # of the leader that computed it; 0: there is only one control plane
    serial: int = 0  # increases with each plan of a term

    @property
    def stamp(self) -> Stamp:
        """Identity of the plan."""
        return (self.term, self.serial)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state loaded from a store."""

    intents: Versioned[Intents]
    plan: SavedPlan | None
    rollouts: Mapping[str, Versioned[Rollout]] = field(default_factory=lambda: EMPTY_MAP)  # by id
    load_errors: tuple[str, ...] = ()  # unusable data that was set aside, a sentence each


class Store(Protocol):
    """Intents, rollouts and the last plan. All reads and writes must be inside `lock()`.

    Every `save_` method replaces only the given version (0: the value must not exist) and returns the new
    version. It raises VersionConflict if a concurrent write came first, and StateUnavailable if it could not
    write; in both cases nothing has changed. With a `term` it writes only while this replica leads in that
    term, and raises NotLeader otherwise.
    """

    is_shared: bool  # whether other control planes may write, too

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
        """Return the saved rollout with that id; None: there is none. Raises StateUnavailable."""
        ...

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Save a rollout. Raises StateUnavailable, VersionConflict or NotLeader."""
        ...

    async def forget_rollout(self, name: str, version: int) -> None:
        """Delete the rollout with that id. Raises StateUnavailable or VersionConflict."""
        ...

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the plan; `saved.term` is this replica's term. Raises NotLeader or StateUnavailable."""
        ...


class Leadership(Protocol):
    """Whether this control plane is the leader, which computes plans and runs rollouts."""

    @property
    def term(self) -> int | None:
        """The current term while this control plane leads and its lease is certainly valid; else None.

        0 if there is only one control plane.
        """
        ...


class SoleLeader:
    """The leadership of a control plane without replicas."""

    @property
    def term(self) -> int | None:
        """Always 0."""
        return 0

"""What is kept over restarts and by whom it may be changed: the seam between the engine and files or etcd."""

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
    """A value with the version of its last write; 0: it was never written."""

    value: T
    version: int = 0


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The last plan, with what is needed to go on from it."""

    plan: Plan
    envoys: Mapping[str, float] = field(
        default_factory=lambda: EMPTY_MAP
    )  # Envoy id -> last seen, Unix seconds
    intents_version: int = 0  # of the intents that it heeds
    term: int = 0  # of the leader that decided it; 0: there is only one control plane
    serial: int = 0  # grows with each plan of a term

    @property
    def stamp(self) -> Stamp:
        """Which plan it is."""
        return (self.term, self.serial)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """All that was found."""

    intents: Versioned[Intents]
    plan: SavedPlan | None
    rollouts: Mapping[str, Versioned[Rollout]] = field(default_factory=lambda: EMPTY_MAP)  # by id
    load_errors: tuple[str, ...] = ()  # what could not be used and was put aside, a sentence each


class Store(Protocol):
    """Intents, rollouts and the last plan. Who wants to read or write is inside `held()`.

    Every `save_` writes only over the version that it is given (0: over nothing) and gives the new one:
    Superseded when somebody else was there before, StateUnavailable when it could not be written; in both
    cases nothing has changed. With a `term` it also writes only while this replica leads in that term:
    NotLeading otherwise.
    """

    is_shared: bool  # other control planes may write, too

    def lock(self) -> AbstractAsyncContextManager[None]:
        """Open while the block runs. ConfigError when it cannot be."""
        ...

    async def load(self) -> LoadedState:
        """All that is kept."""
        ...

    async def read_intents(self) -> Versioned[Intents]:
        """The intents that are kept now. StateUnavailable."""
        ...

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Replace the intents. StateUnavailable, Superseded."""
        ...

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """The rollout with that id as it is kept now; None: there is none. StateUnavailable."""
        ...

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Keep a rollout. StateUnavailable, Superseded, NotLeading."""
        ...

    async def forget_rollout(self, name: str, version: int) -> None:
        """Delete the rollout with that id. StateUnavailable, Superseded."""
        ...

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the plan; `saved.term` is that of this replica. NotLeading, StateUnavailable."""
        ...


class Leadership(Protocol):
    """Whether this control plane is the one that decides and runs rollouts."""

    @property
    def term(self) -> int | None:
        """The number of the present term when we lead and the lease surely holds; None: we do not lead.

        0 where there is only one control plane.
        """
        ...


class SoleLeader:
    """The leadership of a control plane that has no others beside it."""

    @property
    def term(self) -> int | None:
        """Always the same."""
        return 0

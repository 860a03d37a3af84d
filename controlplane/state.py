"""What the control plane keeps on disk: operators' intents and the last plan, in a directory of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.atomic_file import AtomicFile
from controlplane.errors import ConfigError, StateUnavailable
from controlplane.model import NOTHING, Intents, Plan

_REMEDY = "give the user that Tidevoy runs as all rights on it, or set another state_dir"


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The last plan, with what is needed to go on from it."""

    plan: Plan
    envoys: Mapping[str, float] = field(
        default_factory=lambda: NOTHING
    )  # Envoy id -> last seen, Unix seconds


@dataclass(frozen=True, slots=True)
class Stored:
    """All that was found on disk."""

    intents: Intents
    plan: SavedPlan | None
    damages: tuple[str, ...]  # files that could not be used and were moved aside, a sentence each


class StateDirectory:
    """The directory with `intents.json` and `plan.json`, held by one control plane at a time.

    Who wants to read or write is inside `held()`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._intents = AtomicFile(path / "intents.json", "intents", 1, Intents)
        self._plan = AtomicFile(path / "plan.json", "plan", 2, SavedPlan, {1: _of_format_1})

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Creates the directory where it is missing and keeps other control planes out. ConfigError."""
        # Not in a thread: this comes before everything else, and a cancelled thread would leave the lock held
        # by nobody.
        lock = self._lock()
        try:
            yield
        finally:
            os.close(lock)

    async def load(self) -> Stored:
        """What was kept; what cannot be used is moved aside and named. ConfigError when nothing can be read.

        A file that is there but may not be read stops the start: to go on without the intents in it would put
        drained nodes back into service.
        """
        try:
            intents, plan = await self._intents.read(), await self._plan.read()
        except OSError as error:
            raise self._refused(f"{error.filename} cannot be read: {error.strerror}") from None
        return Stored(
            intents=intents.value or Intents(),
            plan=plan.value,
            damages=tuple(kept.damage for kept in (intents, plan) if kept.damage),
        )

    async def save_intents(self, intents: Intents) -> None:
        """Returns when the intents would survive a power cut. StateUnavailable, and the old ones stay."""
        try:
            await self._intents.write(intents)
        except OSError as error:
            raise StateUnavailable(str(self._intents.path), error.strerror or str(error)) from error

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replaces the saved plan. OSError, and the old one stays."""
        await self._plan.write(saved)

    def _lock(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileExistsError:
            raise self._refused("it is not a directory") from None
        except OSError as error:
            raise self._refused(f"{error.filename} cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "another"
            os.close(lock)
            raise self._refused(
                f"the control plane with process id {holder} uses it (lock file {self.path / 'lock'})",
                "stop that one, or set another state_dir",
            ) from None
        except OSError as error:  # a file system that has no locks
            os.close(lock)
            raise self._refused(f"{self.path / 'lock'} cannot be locked: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.close(lock)
            raise self._refused("it cannot be written to")
        with contextlib.suppress(OSError):  # a full disk: who holds the lock is good to know, not more
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _refused(self, problem: str, remedy: str = _REMEDY) -> ConfigError:
        return ConfigError(str(self.path), "state_dir", problem, remedy)


def _of_format_1(content: Any) -> Any:
    """A plan whose round of moves named other things. A start forgets the round of before anyway."""
    match content:
        case {"plan": {"rebalance": dict(past), **plan}, **saved}:
            kept = {name: value for name, value in past.items() if name not in ("moves", "wants")}
            return {**saved, "plan": {**plan, "rebalance": kept}}
    return content

"""What a control plane keeps on disk, in a directory of its own: intents, rollouts and the last plan."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from controlplane.aio import run_to_completion
from controlplane.errors import ConfigError, StateUnavailable, VersionConflict
from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import Rollout
from controlplane.storage.atomic_file import AtomicFile
from controlplane.storage.clamp_timestamps import sort_steps
from controlplane.storage.file_formats import INTENTS_CODEC, PLAN_CODEC, ROLLOUTS_CODEC, RolloutsFile
from controlplane.storage.store import LoadedState, SavedPlan, Versioned

T = TypeVar("T")

_ACCESS_REMEDY = "give the user that Tidevoy runs as all rights on it, or set another state_dir"


class FileStore:
    """A `Store` in a directory that one control plane at a time holds.

    Versions count the writes since it was held; what was found has the version 1.
    """

    is_shared = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._intents = AtomicFile(path / "intents.json", INTENTS_CODEC)
        self._plan = AtomicFile(path / "plan.json", PLAN_CODEC)
        self._rollouts = AtomicFile(path / "rollouts.json", ROLLOUTS_CODEC)
        self._current_intents = Versioned(Intents())
        self._current_rollouts: dict[str, Versioned[Rollout]] = {}
        self._write_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Creates the directory where it is missing and keeps other control planes out. ConfigError."""
        # Not in a thread: this comes before everything else, and a cancelled thread would leave the lock held
        # by nobody.
        lock = self._acquire_lock_file()
        try:
            yield
        finally:
            os.close(lock)

    async def load(self) -> LoadedState:
        """What was kept; what cannot be used is moved aside and named. ConfigError when nothing can be read.

        A file that is there but may not be read stops the start: to go on without the intents in it would put
        drained nodes back into service.
        """
        try:
            intents, plan = await self._intents.read(), await self._plan.read()
            rollouts = await self._rollouts.read()
        except OSError as error:
            raise self._config_error(f"{error.filename} cannot be read: {error.strerror}") from None
        self._current_intents = (
            Versioned(intents.value, 1) if intents.value is not None else Versioned(Intents())
        )
        rollouts_by_id = rollouts.value.rollouts if rollouts.value is not None else EMPTY_MAP
        self._current_rollouts = {
            name: Versioned(sort_steps(rollout), 1) for name, rollout in rollouts_by_id.items()
        }
        return LoadedState(
            intents=self._current_intents,
            plan=plan.value,
            rollouts=MappingProxyType(dict(self._current_rollouts)),
            load_errors=tuple(kept.load_error for kept in (intents, plan, rollouts) if kept.load_error),
        )

    async def read_intents(self) -> Versioned[Intents]:
        """The intents as of the last write."""
        return self._current_intents

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Returns when the intents would survive a power cut. StateUnavailable, Superseded: the old stay."""
        async with self._write_lock:
            _require_version("the set of intents", self._current_intents.version, version)
            await run_to_completion(self._save_intents(Versioned(intents, version + 1)))
        return version + 1

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """The rollout with that id as of the last write."""
        return self._current_rollouts.get(name)

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Returns when the rollout would survive a power cut. StateUnavailable, Superseded.

        Any `term` holds, for nobody else can lead.
        """
        async with self._write_lock:
            self._require_rollout_version(rollout.id, version)
            kept = {**self._current_rollouts, rollout.id: Versioned(rollout, version + 1)}
            await run_to_completion(self._save_rollouts(kept))
        return version + 1

    async def forget_rollout(self, name: str, version: int) -> None:
        """Returns when it would not come back after a power cut. StateUnavailable, Superseded."""
        async with self._write_lock:
            self._require_rollout_version(name, version)
            kept = {known: rollout for known, rollout in self._current_rollouts.items() if known != name}
            await run_to_completion(self._save_rollouts(kept))

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replaces the saved plan. StateUnavailable, and the old one stays."""
        await _write_file(self._plan, saved)

    async def _save_intents(self, stored: Versioned[Intents]) -> None:
        await _write_file(self._intents, stored.value)
        self._current_intents = stored

    async def _save_rollouts(self, stored: dict[str, Versioned[Rollout]]) -> None:
        plain = MappingProxyType({name: rollout.value for name, rollout in stored.items()})
        await _write_file(self._rollouts, RolloutsFile(plain))
        self._current_rollouts = stored

    def _require_rollout_version(self, name: str, version: int) -> None:
        known = self._current_rollouts.get(name)
        _require_version(f"the rollout {name}", known.version if known is not None else 0, version)

    def _acquire_lock_file(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileExistsError:
            raise self._config_error("it is not a directory") from None
        except OSError as error:
            raise self._config_error(f"{error.filename} cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "another"
            os.close(lock)
            raise self._config_error(
                f"the control plane with process id {holder} uses it (lock file {self.path / 'lock'})",
                "stop that one, or set another state_dir",
            ) from None
        except OSError as error:  # a file system that has no locks
            os.close(lock)
            raise self._config_error(f"{self.path / 'lock'} cannot be locked: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.close(lock)
            raise self._config_error("it cannot be written to")
        with contextlib.suppress(OSError):  # a full disk: who holds the lock is good to know, not more
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _config_error(self, problem: str, remedy: str = _ACCESS_REMEDY) -> ConfigError:
        return ConfigError(str(self.path), "state_dir", problem, remedy)


async def _write_file(file: AtomicFile[T], value: T) -> None:
    try:
        await file.write(value)
    except OSError as error:
        raise StateUnavailable(str(file.path), error.strerror or str(error)) from error


def _require_version(subject: str, version: int, expected: int) -> None:
    if version != expected:
        raise VersionConflict(subject)

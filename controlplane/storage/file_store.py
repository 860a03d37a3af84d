"""The store of a single control plane: intents, rollouts and the last plan in a local directory."""

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

_ACCESS_REMEDY = "give Tidevoy's user read and write access to it, or set another state_dir"


class FileStore:
    """A `Store` in a directory that one control plane at a time locks.

    Versions count the writes since the directory was locked; loaded values have version 1.
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
        """Create the directory if missing, and lock it against other control planes. Raises ConfigError."""
        # Not in a thread: nothing else runs yet, and a cancelled thread would never release the lock.
        lock_fd = self._acquire_lock_file()
        try:
            yield
        finally:
            os.close(lock_fd)

    async def load(self) -> LoadedState:
        """Load the saved state. Unusable files are moved aside and reported in `load_errors`.

        Raises ConfigError if a file exists but cannot be read: starting without its intents would put drained
        nodes back into service.
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
            load_errors=tuple(result.load_error for result in (intents, plan, rollouts) if result.load_error),
        )

    async def read_intents(self) -> Versioned[Intents]:
        """Return the intents of the last write."""
        return self._current_intents

    async def save_intents(self, intents: Intents, version: int) -> int:
        """Replace the intents durably. Raises StateUnavailable or VersionConflict; then the old ones stay."""
        async with self._write_lock:
            _require_version("the set of intents", self._current_intents.version, version)
            await run_to_completion(self._save_intents(Versioned(intents, version + 1)))
        return version + 1

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        """Return the rollout with that id as of the last write."""
        return self._current_rollouts.get(name)

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        """Save the rollout durably. Raises StateUnavailable or VersionConflict.

        `term` is ignored: there is no other control plane that could lead.
        """
        async with self._write_lock:
            self._require_rollout_version(rollout.id, version)
            updated = {**self._current_rollouts, rollout.id: Versioned(rollout, version + 1)}
            await run_to_completion(self._save_rollouts(updated))
        return version + 1

    async def forget_rollout(self, name: str, version: int) -> None:
        """Delete the rollout durably. Raises StateUnavailable or VersionConflict."""
        async with self._write_lock:
            self._require_rollout_version(name, version)
            remaining = {other: rollout for other, rollout in self._current_rollouts.items() if other != name}
            await run_to_completion(self._save_rollouts(remaining))

    async def save_plan(self, saved: SavedPlan) -> None:
        """Replace the saved plan. Raises StateUnavailable; then the old one stays."""
        await _write_file(self._plan, saved)

    async def _save_intents(self, stored: Versioned[Intents]) -> None:
        await _write_file(self._intents, stored.value)
        self._current_intents = stored

    async def _save_rollouts(self, stored: dict[str, Versioned[Rollout]]) -> None:
        values = MappingProxyType({name: rollout.value for name, rollout in stored.items()})
        await _write_file(self._rollouts, RolloutsFile(values))
        self._current_rollouts = stored

    def _require_rollout_version(self, name: str, version: int) -> None:
        current = self._current_rollouts.get(name)
        _require_version(f"the rollout {name}", current.version if current is not None else 0, version)

    def _acquire_lock_file(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileExistsError:
            raise self._config_error("it is not a directory") from None
        except OSError as error:
            raise self._config_error(f"{error.filename} cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip() or "another"
            os.close(lock_fd)
            raise self._config_error(
                f"the control plane with process id {holder} uses it (lock file {self.path / 'lock'})",
                "stop that one, or set another state_dir",
            ) from None
        except OSError as error:  # a file system without locks
            os.close(lock_fd)
            raise self._config_error(f"{self.path / 'lock'} cannot be locked: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.close(lock_fd)
            raise self._config_error("it is not writable")
        with contextlib.suppress(OSError):  # e.g. a full disk: the process id in the file is only informative
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        return lock_fd

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

"""The store of a single control plane: intents, rollouts and the last plan in a local directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from controlplane.aio import run_to_completion
from controlplane.errors import ConfigError, StateUnavailable, VersionConflict
from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rollout import Rollout
from controlplane.storage.atomic_file import AtomicFile
from controlplane.storage.file_formats import INTENTS_CODEC, PLAN_CODEC, ROLLOUTS_CODEC, RolloutsFile
from controlplane.storage.restored_state import sort_steps
from controlplane.storage.store import LoadedState, SavedPlan, Versioned
from controlplane.storage.versioned_codec import WrittenByNewer

T = TypeVar("T")

_ACCESS_REMEDY = "give Tidevoy's user read and write access to it, or set another state_dir"
_NEWER_REMEDY = "run the newer Tidevoy, or move the file away to start without its content"


class FileStore:
    """A `Store` in a directory that one control plane at a time locks.

    A value has version 1 when it is loaded; each write increments the version. `term` is ignored:
    no other control plane can lead.
    """

    def __init__(self, path: Path, *, is_copy: bool = False) -> None:
        """`is_copy`: the directory is a replica's copy of what is in PD."""
        self.path = path
        self._intents = AtomicFile(path / "intents.json", INTENTS_CODEC, is_copy=is_copy)
        self._plan = AtomicFile(path / "plan.json", PLAN_CODEC, is_copy=is_copy)
        self._rollouts = AtomicFile(path / "rollouts.json", ROLLOUTS_CODEC, is_copy=is_copy)
        self._current_intents = Versioned(Intents())
        self._current_rollouts: dict[str, Versioned[Rollout]] = {}
        self._write_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Create the directory if missing, and lock it against other control planes. Raises ConfigError."""
        # Lock without a thread: nothing else runs yet, and a cancelled thread would never release the lock.
        lock_fd = self._acquire_lock_file()
        try:
            yield
        finally:
            os.close(lock_fd)

    async def load(self) -> LoadedState:
        """Load the saved state. Damaged files are moved aside and reported in `load_errors`.

        Raises ConfigError if a file exists but cannot be read, or was written by a newer Tidevoy: starting
        without its intents would put drained nodes back into service.
        """
        try:
            # The intents come last: if another file stops this start, damaged intents are not moved aside
            # without a report.
            plan, rollouts = await self._plan.read(), await self._rollouts.read()
            intents = await self._intents.read()
        except OSError as error:
            raise self._config_error(f"{error.filename} cannot be read: {error.strerror}") from None
        except WrittenByNewer as error:
            raise self._config_error(str(error), _NEWER_REMEDY) from None
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
        return self._current_intents

    async def save_intents(self, intents: Intents, version: int) -> int:
        def on_written() -> None:
            self._current_intents = Versioned(intents, version + 1)

        async with self._write_lock:
            _require_version("the set of intents", self._current_intents.version, version)
            await run_to_completion(_write(self._intents, intents, on_written))
        return version + 1

    async def read_rollout(self, name: str) -> Versioned[Rollout] | None:
        return self._current_rollouts.get(name)

    async def save_rollout(self, rollout: Rollout, version: int, term: int | None = None) -> int:
        await self._replace_rollout(rollout.id, version, Versioned(rollout, version + 1))
        return version + 1

    async def delete_rollout(self, name: str, version: int) -> None:
        await self._replace_rollout(name, version, None)

    async def save_plan(self, saved: SavedPlan) -> None:
        await run_to_completion(self._plan.write(saved))

    async def _replace_rollout(self, name: str, version: int, new: Versioned[Rollout] | None) -> None:
        async with self._write_lock:
            rollouts = dict(self._current_rollouts)
            current = rollouts.pop(name, None)
            _require_version(f"the rollout {name}", current.version if current is not None else 0, version)
            if new is not None:
                rollouts[name] = new

            def on_written() -> None:
                self._current_rollouts = rollouts

            values = MappingProxyType({name: rollout.value for name, rollout in rollouts.items()})
            await run_to_completion(_write(self._rollouts, RolloutsFile(values), on_written))

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


async def _write(file: AtomicFile[T], value: T, on_written: Callable[[], None]) -> None:
    """Write a file; call `on_written` if the file has the value, even if it may not be durable."""
    try:
        await file.write(value)
    except StateUnavailable as error:
        if not error.is_certain:
            on_written()
        raise
    on_written()


def _require_version(subject: str, version: int, expected: int) -> None:
    if version != expected:
        raise VersionConflict(subject)

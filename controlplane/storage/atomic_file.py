"""One value in one file that is replaced atomically: a reader gets the old value or the new one.

A damaged file is moved aside and reported, not deleted. A file of a newer Tidevoy stays where it is.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from controlplane.aio import ThreadPool
from controlplane.errors import StateUnavailable
from controlplane.storage.versioned_codec import DecodeError, VersionedCodec, WrittenByNewer

T = TypeVar("T")

# For file access and the encoding of large values, which would block the event loop.
STORAGE_THREADS = ThreadPool("storage", 4)


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[T]):
    """The value of a file, or None if the file does not exist or is unusable."""

    value: T | None
    load_error: str = ""  # a sentence: why the file is unusable, and where it was moved


class AtomicFile(Generic[T]):
    """A file that contains one frozen dataclass. Only one process may write it (see `file_store`)."""

    def __init__(self, path: Path, codec: VersionedCodec[T], *, is_copy: bool = False) -> None:
        """`is_copy`: the value is also elsewhere, so even a file of a newer Tidevoy is moved aside."""
        self.path = path
        self._codec = codec
        self._is_copy = is_copy

    async def read(self) -> ReadResult[T]:
        """Return the value of the last write.

        Raises OSError if the file cannot be read or moved aside, and WrittenByNewer, which names the file.
        """
        return await STORAGE_THREADS.run(self._read)

    async def write(self, value: T) -> None:
        """Return once the value is durably on disk. Raises StateUnavailable.

        Complete each write before the next one: a cancelled call may still write, and replace a newer value.
        """
        await STORAGE_THREADS.run(self._write, value)

    def _read(self) -> ReadResult[T]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return ReadResult(None)
        try:
            return ReadResult(self._codec.decode(raw))
        except DecodeError as error:
            if isinstance(error, WrittenByNewer) and not self._is_copy:
                raise WrittenByNewer(f"{self.path.name} is unusable, because {error}") from None
            aside = self._move_aside()
            return ReadResult(None, f"{self.path} is unusable, because {error}; it was moved to {aside}")

    def _write(self, value: T) -> None:
        encoded = self._codec.encode(value)
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(temporary, "wb", opener=_open_owner_only) as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StateUnavailable(str(self.path), error.strerror or str(error)) from error
        try:
            _sync_directory(self.path.parent)
        except OSError as error:  # the file is replaced, but a crash of the machine may undo that
            problem = error.strerror or str(error)
            raise StateUnavailable(str(self.path), problem, is_certain=False) from error

    def _move_aside(self) -> Path:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        target = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        number = 1
        while target.exists():
            number += 1
            target = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{number}")
        os.rename(self.path, target)
        _sync_directory(self.path.parent)
        return target


def _open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(path: Path) -> None:
    """Make a rename durable: syncing a file does not sync its directory, see fsync(2)."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

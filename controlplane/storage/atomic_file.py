"""One value kept in one file that is always whole: a reader finds the old value or the new one.

What is found there and cannot be used is moved aside and reported; nothing is deleted or overwritten unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from controlplane.aio import run_to_completion
from controlplane.storage.versioned_codec import DecodeError, VersionedCodec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[T]):
    """What a file held: its value, or None when there is no file or its content could not be used."""

    value: T | None
    load_error: str = ""  # what could not be used, and where it was put, as a sentence


class AtomicFile(Generic[T]):
    """A file that holds one frozen dataclass. Only one process may write it (see `file_store`)."""

    def __init__(self, path: Path, codec: VersionedCodec[T]) -> None:
        self.path = path
        self._codec = codec
        self._write_lock = asyncio.Lock()

    async def read(self) -> ReadResult[T]:
        """The value, as of the last write. OSError when the file cannot be read at all or not moved aside."""
        return await asyncio.to_thread(self._read)

    async def write(self, value: T) -> None:
        """Returns when the value is on disk for good. OSError, and then the file is as it was.

        A cancelled write is finished first: a thread that still writes while the next write begins could
        bring back an older value.
        """
        async with self._write_lock:
            await run_to_completion(asyncio.to_thread(self._write, value))

    def _read(self) -> ReadResult[T]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return ReadResult(None)
        try:
            return ReadResult(self._codec.decode(raw))
        except DecodeError as error:
            aside = self._move_aside()
            return ReadResult(None, f"{self.path} could not be used, because {error}; it is kept as {aside}")

    def _write(self, value: T) -> None:
        encoded = self._codec.encode(value)
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(temporary, "wb", opener=_open_owner_only) as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(self.path.parent)

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
    """Makes a rename durable: syncing a file does not sync the directory that names it, see fsync(2)."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

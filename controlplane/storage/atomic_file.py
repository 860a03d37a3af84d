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

from controlplane.aio import uninterrupted
from controlplane.storage.versioned_codec import Envelope, Unusable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What a file held: its value, or None when there is no file or its content could not be used."""

    value: T | None
    damage: str = ""  # what could not be used, and where it was put, as a sentence


class AtomicFile(Generic[T]):
    """A file that holds one frozen dataclass. Only one process may write it (see `file_store`)."""

    def __init__(self, path: Path, envelope: Envelope[T]) -> None:
        self.path = path
        self._envelope = envelope
        self._writing = asyncio.Lock()

    async def read(self) -> Kept[T]:
        """The value, as of the last write. OSError when the file cannot be read at all or not moved aside."""
        return await asyncio.to_thread(self._read)

    async def write(self, value: T) -> None:
        """Returns when the value is on disk for good. OSError, and then the file is as it was.

        A cancelled write is finished first: a thread that still writes while the next write begins could
        bring back an older value.
        """
        async with self._writing:
            await uninterrupted(asyncio.to_thread(self._write, value))

    def _read(self) -> Kept[T]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return Kept(None)
        try:
            return Kept(self._envelope.open(raw))
        except Unusable as unusable:
            aside = self._move_aside()
            return Kept(None, f"{self.path} could not be used, because {unusable}; it is kept as {aside}")

    def _write(self, value: T) -> None:
        sealed = self._envelope.seal(value)
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(sealed)
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
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{number}")
        os.rename(self.path, aside)
        _sync_directory(self.path.parent)
        return aside


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(path: Path) -> None:
    """Makes a rename durable: syncing a file does not sync the directory that names it, see fsync(2)."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""A small file system that a test fills up."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MNT_DETACH = 2
_BLOCK_BYTES = 64 * 1024


class SmallDisk:
    """The file system at `path`. Only `fill` and `free` change how much of it is used up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Use all space that is left."""
        file = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            size = _BLOCK_BYTES
            while size:  # Blocks become smaller until not even one byte can be written.
                try:
                    os.write(file, bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        finally:
            os.close(file)

    def free(self) -> None:
        """Release the space that `fill` has used."""
        self._filler.unlink()


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system of this size at the new directory `path`. Skip the test if that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    target = os.fsencode(path)
    if libc.mount(b"tmpfs", target, b"tmpfs", 0, f"size={size_bytes}".encode()):
        pytest.skip(f"cannot mount a file system: {os.strerror(ctypes.get_errno())}; run it as root")
    try:
        yield SmallDisk(path)
    finally:
        # Detach it even if a process still has an open file there.
        assert libc.umount2(target, _MNT_DETACH) == 0, os.strerror(ctypes.get_errno())

"""Directories in which tests keep builds for later runs. All checkouts share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return the directory for one kind of build, in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidevoy" / name


@contextmanager
def locked(directory: Path, name: str) -> Iterator[None]:
    """Let one process at a time run the build of this name, whose result is kept in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

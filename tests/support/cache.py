"""Directories in which tests keep builds for later runs. All checkouts share them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return the directory for one kind of build, in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidevoy" / name

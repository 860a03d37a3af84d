"""The wheel, and the locked versions of the packages that it needs."""

from __future__ import annotations

import sys
from pathlib import Path

from release.programs import run

PYTHON_VERSION = "3.11"
UV = (sys.executable, "-m", "uv", "--no-progress", "--quiet")


def build_wheel(root: Path, directory: Path) -> Path:
    """Build the wheel with module and supervisor, and return its path. Raises ReleaseError."""
    run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)],
        "run `make` first",
        cwd=root,
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


def lock_requirements(root: Path, extras: tuple[str, ...] = ()) -> str:
    """Return the packages that the wheel needs, with the versions and hashes of requirements.lock."""
    return run(
        [
            *(*UV, "pip", "compile", "--universal", "--python-version", PYTHON_VERSION, "--generate-hashes"),
            *("--no-header", "--no-annotate", "--no-emit-index-url", "--constraints", "requirements.lock"),
            *(f"--extra={extra}" for extra in extras),
            "pyproject.toml",
        ],
        "run `make` first",
        cwd=root,
    )

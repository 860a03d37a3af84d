"""Runs the programs that build a release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from release.errors import ReleaseError


def run(command: list[str], hint: str, cwd: Path | None = None) -> str:
    """Run a program and return its output. Raises ReleaseError, with `hint` if there is no such program."""
    try:
        result = subprocess.run(command, cwd=cwd, env=os.environ, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ReleaseError(f"there is no program {command[0]}: {hint}") from error
    if result.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}".rstrip())
    return result.stdout

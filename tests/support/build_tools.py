"""Compilers and package managers that build programs for tests."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from controlplane.errors import TidevoyError
from sandbox.child_process import ProgramMissing, find_program

# On two slow cores, Helm takes five minutes.
_TIMEOUT_SECONDS = 1800.0


class BuildFailed(TidevoyError):
    """A program could not be built. The text names the reason or has the end of the tool's output."""


class LanguageNotPackaged(ProgramMissing):
    """Debian 12 has no suitable version of this compiler, so `make test` cannot install it."""


def run_tool(
    command: Sequence[str | Path],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    *,
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """Run a build command with these additional variables, and return its output. Raises BuildFailed."""
    words = [str(word) for word in command]
    try:
        result = subprocess.run(
            words,
            cwd=directory,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{' '.join(words)} took more than {timeout:.0f} s") from None
    if result.returncode != 0:
        raise BuildFailed(f"{' '.join(words)} failed:\n{(result.stdout + result.stderr)[-4000:]}")
    return result.stdout


def find_tool(program: str, install: str) -> str:
    """Return the path of a program. Raises ProgramMissing, which says how to install it."""
    try:
        return find_program(program, "")
    except ProgramMissing:
        raise ProgramMissing(program, install) from None


def find_go() -> str:
    """Return the path of Go, in a version that can build all programs. Raises LanguageNotPackaged."""
    try:
        go = find_program("go", "")
        version = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    except (ProgramMissing, subprocess.CalledProcessError):
        version = ""
    # Go 1.21 and later fetch 1.24 by themselves.
    match = re.match(r"go version go(\d+)\.(\d+)", version)
    if match is None or tuple(map(int, match.groups())) < (1, 21):
        raise LanguageNotPackaged("Go 1.24 or newer", "the package of go.dev/doc/install")
    return go

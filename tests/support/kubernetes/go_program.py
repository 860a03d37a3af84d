"""Go programs for tests of the Helm chart. `python -m tests.support.kubernetes.go_program` installs Helm.

Each version is built once, in the user's cache directory. With `--strict`, a failure is an error.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from controlplane.errors import TidevoyError
from sandbox.child_process import ProgramMissing, find_program
from tests.support.cache import cache_directory

CACHE = cache_directory("go")
# On two slow cores, Helm takes five minutes.
_BUILD_TIMEOUT_SECONDS = 1800.0


class GoMissing(ProgramMissing):
    """There is no Go that can build the program. Debian 12 has no suitable version."""


class GoBuildFailed(TidevoyError):
    """A program could not be built. The text has the end of the output of `go`."""


@dataclass(frozen=True, slots=True)
class GoProgram:
    """A command of a Go module, at a fixed version."""

    name: str
    package: str
    version: str

    @property
    def path(self) -> Path:
        """Where the program is, if it is installed."""
        return CACHE / f"{self.name}-{self.version}" / self.name

    def install(self) -> Path:
        """Return the path of the program; build it first if needed, or wait for a concurrent build.

        Raises GoMissing or GoBuildFailed.
        """
        if self.path.exists():
            return self.path
        with locked(self.name):
            if not self.path.exists():
                environment = {"GOBIN": str(self.path.parent), "GOFLAGS": "-trimpath"}
                run_go(["install", f"{self.package}@{self.version}"], Path.cwd(), environment)
        return self.path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process of this machine at a time run the build of this name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_go(
    arguments: Sequence[str], directory: Path, environment: Mapping[str, str], *, timeout: float | None = None
) -> str:
    """Run `go` and return its output. Raises GoMissing or GoBuildFailed."""
    try:
        result = subprocess.run(
            [_find_go(), *arguments],
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout or _BUILD_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GoBuildFailed(f"go {' '.join(arguments)} took more than {error.timeout:.0f} s") from None
    if result.returncode != 0:
        raise GoBuildFailed(f"go {' '.join(arguments)} failed:\n{result.stderr[-4000:]}")
    return result.stdout


def _find_go() -> str:
    try:
        go = find_program("go", "")
        version = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    except (ProgramMissing, subprocess.CalledProcessError):
        version = ""
    # Go 1.21 and later fetch 1.24 by themselves.
    match = re.match(r"go version go(\d+)\.(\d+)", version)
    if match is None or tuple(map(int, match.groups())) < (1, 21):
        raise GoMissing("Go 1.24 or newer", "the package of go.dev/doc/install")
    return go


HELM = GoProgram("helm", "helm.sh/helm/v3/cmd/helm", "v3.19.5")


def main() -> int:
    """Install Helm. Print an error if that fails."""
    try:
        HELM.install()
    except (GoBuildFailed, GoMissing) as error:
        print(error, file=sys.stderr)
        return 1 if "--strict" in sys.argv else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

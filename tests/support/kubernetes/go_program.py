"""Go programs for tests of the Helm chart. `python -m tests.support.kubernetes.go_program` installs Helm.

Each version is built once, in the user's cache directory. With `--strict`, a failure is an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.build_tools import BuildFailed, LanguageNotPackaged, find_go, run_tool
from tests.support.cache import cache_directory, locked

CACHE = cache_directory("go")


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

        Raises LanguageNotPackaged if there is no Go, and BuildFailed.
        """
        if self.path.exists():
            return self.path
        with locked(CACHE, self.name):
            if not self.path.exists():
                environment = {"GOBIN": str(self.path.parent), "GOFLAGS": "-trimpath"}
                run_tool([find_go(), "install", f"{self.package}@{self.version}"], Path.cwd(), environment)
        return self.path


HELM = GoProgram("helm", "helm.sh/helm/v3/cmd/helm", "v3.19.5")


def main() -> int:
    """Install Helm. Print an error if that fails."""
    try:
        HELM.install()
    except (BuildFailed, LanguageNotPackaged) as error:
        print(error, file=sys.stderr)
        return 1 if "--strict" in sys.argv else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Builds the load client `bench/client`: `python -m tests.support.load.build_load_client`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.prebuild import exit_when_stdin_closes, lower_own_priority

_ROOT = Path(__file__).parents[3]


def main() -> int:
    """Build what bench/load_client.py would build; cargo serializes the two."""
    exit_when_stdin_closes()
    lower_own_priority()
    command = ["cargo", "build", "--quiet", "--release", "--locked"]
    command += ["--manifest-path", str(_ROOT / "bench/client/Cargo.toml")]
    # Not with its Process, whose session would not have the low priority.
    return subprocess.run([*command, "--target-dir", str(_ROOT / "filters/target")]).returncode


if __name__ == "__main__":
    sys.exit(main())

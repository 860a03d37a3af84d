"""Run the program that replays captures."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controlplane.programs import find_program
from tests.support.traffic.capture_writer import read_results

TIMEOUT_SECONDS = 60.0


def require_replay_program() -> Path:
    """Return the program. Fails the test if it is not built."""
    program = find_program("tidevoy-replay")
    if program is None:
        pytest.fail("tidevoy-replay is not built; run: make filters/target/release/libtidevoy.so")
    return program


@dataclass(frozen=True)
class Replay:
    """A replay that has ended."""

    output: Path
    exit_code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.stdout)
        return summary

    @property
    def totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = self.summary["totals"]
        return totals

    def results(self) -> list[dict[str, Any]]:
        """Return the lines of the results files, by connection and time."""
        return read_results(self.output)

    def errors(self) -> list[int]:
        return [result["error"] for result in self.results()]

    def rows(self) -> list[int]:
        return [result["rows"] for result in self.results()]


def replay_command(*inputs: str | Path, address: str, output: Path, user: str = "root") -> list[str]:
    """Return the command of a replay as fast as possible, with its summary as JSON."""
    return [
        *(str(require_replay_program()), "run", *map(str, inputs), "--target", address, "--user", user),
        *("--output", str(output), "--json"),
    ]


def run_replay(*inputs: str | Path, address: str, output: Path, user: str = "root") -> Replay:
    """Replay until the end. `inputs`: directories and further options."""
    command = replay_command(*inputs, address=address, output=output, user=user)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    return Replay(output, done.returncode, done.stdout, done.stderr)

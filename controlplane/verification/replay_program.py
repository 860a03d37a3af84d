"""The program `tidevoy-replay`: where it is, and its arguments."""

from __future__ import annotations

from pathlib import Path

from controlplane.errors import TidevoyError
from controlplane.programs import find_program, how_to_install

PROGRAM = "tidevoy-replay"


class ReplayProgramMissing(TidevoyError):
    """The program that replays traffic is not installed."""

    def __init__(self) -> None:
        super().__init__(f"{PROGRAM} is not installed; {how_to_install(PROGRAM)}")


def find_replay_program() -> Path:
    """Return the program. Raises ReplayProgramMissing."""
    program = find_program(PROGRAM)
    if program is None:
        raise ReplayProgramMissing
    return program


def compare_arguments(old: Path, new: Path, json_file: Path) -> list[str]:
    """Return the arguments that compare the results of two replays, and write the comparison to a file."""
    return ["compare", str(old), str(new), "--json", str(json_file)]

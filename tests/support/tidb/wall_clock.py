"""A wall clock that can be set for some processes only, while they run.

Debian's faketime cannot do this: Envoy does not start with libfaketime, and Python's `time.sleep` fails.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path
from typing import Self

from sandbox.child_process import find_program
from sandbox.server import Server

_SOURCE = Path(__file__).with_name("wall_clock_offset.c")
_OFFSET = struct.Struct("=q")


class WallClock:
    """The wall clock of the servers to which it is applied. It is true at first."""

    def __init__(self, library: Path, offset_file: Path) -> None:
        self._library, self._offset_file = library, offset_file
        with offset_file.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), _OFFSET.size)

    @classmethod
    def build(cls, directory: Path) -> Self:
        """Compile the library that shifts the clock."""
        library, offset_file = directory / "wall_clock_offset.so", directory / "wall_clock_offset"
        compiler = find_program("cc", "gcc libc6-dev")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
        offset_file.write_bytes(_OFFSET.pack(0))
        return cls(library, offset_file)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a process that uses this clock."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET_FILE": str(self._offset_file)}

    def apply_to(self, server: Server) -> None:
        """Use this clock from the server's next start on."""
        server.extra_variables = {**server.extra_variables, **self.variables}

    def set_offset(self, seconds: int) -> None:
        """Set how far the clock is ahead of the true time."""
        self._mapped[:] = _OFFSET.pack(seconds)

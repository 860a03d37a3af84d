"""The `tidevoy` command as its users run it: a process with arguments, an exit code and output."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.client import ControlPlaneClient
from sandbox.ports import Ports

TIDEVOY = str(Path(sys.executable).with_name("tidevoy"))


@dataclass(frozen=True, slots=True)
class CliResult:
    """The result of one command."""

    exit_code: int
    stdout: str
    stderr: str


async def start_tidevoy(url: str, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
    """Start the command for the control plane at `url`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    return await asyncio.create_subprocess_exec(
        TIDEVOY,
        *arguments,
        env={**inherited, "TIDEVOY_URL": url, **environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def wait_for_result(process: asyncio.subprocess.Process) -> CliResult:
    """Wait for a started command and return its result."""
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return CliResult(process.returncode, out.decode(), err.decode())


async def run_tidevoy(url: str, *arguments: str) -> CliResult:
    """Run a command and return its result."""
    return await wait_for_result(await start_tidevoy(url, *arguments))


def minimal_configuration(directory: Path, ports: Ports, *nodes: str, **xds: Any) -> dict[str, Any]:
    """Return settings on free ports for a control plane with these nodes and fast checks."""
    return {
        "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "xds": {"listen": f"127.0.0.1:{ports.allocate()}", **xds},
        "sql": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "state_dir": str(directory / "state"),
        "health": {"sql": {"interval": 0.1}},
        "drain": {"reconnect_grace": 0},
        "nodes": [{"address": address} for address in nodes],
    }


class FakeApiClient(ControlPlaneClient):
    """A client whose control plane answers requests for `path` with these answers, or raises them."""

    def __init__(self, path: str, *answers: dict[str, Any] | BaseException) -> None:
        super().__init__("http://127.0.0.1:1")
        self._path, self._answers = path, iter(answers)

    def get(self, path: str) -> Any:
        assert path == self._path
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

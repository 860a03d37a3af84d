"""The `tidevoy` command as its users run it: a process with arguments, an exit code and output."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cli.client import ControlPlaneClient
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.support.waiting import wait_until

TIDEVOY = str(Path(sys.executable).with_name("tidevoy"))


@dataclass(frozen=True, slots=True)
class CliResult:
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


async def wait_for_result(process: asyncio.subprocess.Process, seconds: float = 60.0) -> CliResult:
    """Wait for a started command and return its result. Kill it after `seconds`, and raise TimeoutError."""
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return CliResult(process.returncode, out.decode(), err.decode())


async def run_tidevoy(url: str, *arguments: str) -> CliResult:
    """Run the command with these arguments and return its result."""
    return await wait_for_result(await start_tidevoy(url, *arguments))


async def wait_for_node_state(url: str, address: str, state: str) -> None:
    """Wait until the control plane at `url` reports a node in this state."""
    async with http_client(url) as api:

        async def has_state() -> bool:
            response = await api.get(f"/v1/nodes/{address}")
            return bool(response.is_success and response.json()["state"] == state)

        await wait_until(has_state, 30)


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
    """A client that accepts only requests for `path`. Each request returns or raises the next answer."""

    def __init__(self, path: str, *answers: dict[str, Any] | BaseException) -> None:
        super().__init__("http://127.0.0.1:1")
        self._path, self._answers = path, iter(answers)

    def get(self, path: str, **query: Any) -> Any:
        assert (path, query) == (self._path, {})
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def fake_http(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx2.Request], Any]
) -> list[httpx2.Request]:
    """Let commands in this process get a response, an error or JSON from `answer`. They never wait.

    Return the list of their requests, which grows.
    """
    requests = list[httpx2.Request]()

    def respond(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        if isinstance(result := answer(request), BaseException):
            raise result
        return result if isinstance(result, httpx2.Response) else httpx2.Response(200, json=result)

    monkeypatch.setattr(httpx2, "Client", partial(httpx2.Client, transport=httpx2.MockTransport(respond)))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("TIDEVOY_URL", "http://127.0.0.1:3080")
    for variable in ("TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.setenv(f"TIDEVOY_{variable}", "")  # restored afterwards, because commands set them
    return requests

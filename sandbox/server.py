"""A server process for tests and the sandbox: start it and wait until it serves, kill it, restart it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit
from sandbox.ports import Ports, is_port_free

_POLL_SECONDS = 0.03


async def http_responds(url: str) -> bool:
    """Return whether a GET of `url` is answered with 200."""
    try:
        async with httpx2.AsyncClient(trust_env=False, timeout=2.0, verify=False) as client:
            return (await client.get(url)).status_code == 200
    except httpx2.TransportError:
        return False


async def accepts_connections(port: int) -> bool:
    """Return whether a process listens on `port`."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.transport.abort()
    return True


async def sends_mysql_greeting(port: int) -> bool:
    """Return whether `port` sends a MySQL greeting of protocol version 10 (MySQL, HandshakeV10)."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    try:
        async with asyncio.timeout(5.0):
            greeting = await reader.readexactly(5)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return False
    finally:
        # Reset instead of a clean close: the server must not wait for a login that never comes.
        writer.transport.abort()
    return greeting[4] == 10


class Server(ABC):
    """One server on this machine. `async with server:` starts and stops it; ports and data survive a restart.

    Subclasses define how to run it (`command`) and how to check that it serves (`is_serving`).
    """

    start_timeout_seconds = 60.0
    stop_timeout = 10.0

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory.absolute()
        self.ports = Ports()
        self._process: ChildProcess | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program (absolute path) and its arguments."""

    def listen_ports(self) -> list[int]:
        """Return the fixed ports that it listens on."""
        return []

    @abstractmethod
    async def is_serving(self) -> bool:
        """Return whether it serves now. Connection errors (OSError) count as no."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the environment that it runs in; None: ours."""
        return None

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare a start, before each one."""

    def failure_summary(self, process: ChildProcess) -> str:
        """Return the part of its output that best explains a failure."""
        return process.tail()

    @property
    def display_name(self) -> str:
        """Its name in error messages."""
        return self.name

    @property
    def process(self) -> ChildProcess:
        """The process that was started last."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    @property
    def has_started(self) -> bool:
        """Whether it has ever been started."""
        return self._process is not None

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def launch(self) -> None:
        """Start it and wait until it serves. Raises ProcessFailed, with its output, if it does not."""
        if self.is_running:
            raise RuntimeError(f"{self.name} is already running")
        for port in self.listen_ports():
            # Checked here, because until the server notices, the other program would be mistaken for it.
            if not is_port_free(port):
                raise ProcessFailed(
                    self.display_name, f"cannot start: port {port} is taken by another program", ""
                )
        await self.prepare()
        process = self._process = ChildProcess.start(
            self.name, self.command(), directory=self.directory, env=self.environment()
        )
        try:
            await self._wait_until_serving(process)
        except BaseException:
            await process.kill()
            raise

    async def kill(self) -> None:
        """Stop it with SIGKILL."""
        await self.process.kill()

    async def terminate(self, grace: float | None = None) -> int:
        """Stop it with SIGTERM, and after `grace` seconds with SIGKILL; return its return code."""
        return await self.process.terminate(self.stop_timeout if grace is None else grace)

    async def restart(self) -> None:
        """Start it again on the same ports and data; stop it first if it still runs."""
        if self.is_running:
            await self.terminate()
        await self.launch()

    async def wait_for_failure(self) -> ProcessFailed:
        """Wait for its exit, and return that as an error with its last output."""
        process = self.process
        code = await process.wait()
        return ProcessFailed(self.display_name, describe_exit(code), self.failure_summary(process))

    async def __aenter__(self) -> Self:
        try:
            await self.launch()
        except BaseException:
            self.ports.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.is_running:
                await self.terminate()
        finally:
            self.ports.close()

    async def _wait_until_serving(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + self.start_timeout_seconds
        while True:
            code = process.returncode
            if code is not None:
                raise ProcessFailed(
                    self.display_name,
                    f"did not start: it {describe_exit(code)}",
                    self.failure_summary(process),
                )
            try:
                if await self.is_serving():
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                reason = f"did not serve within {self.start_timeout_seconds:.0f} s"
                raise ProcessFailed(self.display_name, reason, self.failure_summary(process))
            await asyncio.sleep(_POLL_SECONDS)

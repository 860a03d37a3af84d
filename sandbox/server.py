"""A server process for tests and the sandbox: start it and wait until it serves, kill it, restart it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx2

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit
from sandbox.ports import Ports, is_port_free

_POLL_SECONDS = 0.03


def http_client(base_url: str = "", timeout: float = 10.0) -> httpx2.AsyncClient:
    """Return a client for servers on this machine. It ignores proxy settings.

    It verifies no certificate, because loading the system's CAs takes 35 ms of CPU per client.
    """
    return httpx2.AsyncClient(base_url=base_url, trust_env=False, verify=False, timeout=timeout)


async def http_responds(url: str) -> bool:
    """Return whether a GET of `url` returns 200."""
    try:
        async with http_client(timeout=2.0) as client:
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
        # Reset the connection: after a clean close, the server might wait for the login.
        writer.transport.abort()
    return greeting[4] == 10


class Server(ABC):
    """One server on this machine. `async with server:` starts and stops it. A restart keeps ports and data.

    Subclasses define how to run the server (`command`) and how to check it (`is_serving`).
    """

    start_timeout_seconds = 60.0
    stop_timeout = 10.0
    config_suffix = ".yaml"
    hidden_variables = "(?!)"
    """Pattern of environment variables that the process does not inherit, since they might configure it."""
    extra_variables: Mapping[str, str] = {}

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory.absolute()
        self.ports = Ports()
        self._process: ChildProcess | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program (absolute path) and its arguments."""

    def listen_ports(self) -> list[int]:
        """Return the fixed ports on which the server listens."""
        return []

    @abstractmethod
    async def is_serving(self) -> bool:
        """Return whether the server is ready. An OSError also means not ready."""

    def environment(self) -> Mapping[str, str]:
        hidden = re.compile(self.hidden_variables)
        inherited = {name: value for name, value in os.environ.items() if not hidden.fullmatch(name)}
        return {**inherited, **self.extra_variables}

    def configuration(self) -> str | None:
        """Return the content of the configuration file for the next start, or None for no file."""
        return None

    @property
    def config_file(self) -> Path:
        """The configuration file, written before each start."""
        return self.directory / f"{self.name}{self.config_suffix}"

    async def prepare(self) -> None:
        """Write the configuration file. `launch` calls this before each start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        content = self.configuration()
        if content is not None:
            self.config_file.write_text(content)

    def failure_summary(self, process: ChildProcess) -> str:
        """Return the part of the output that best explains a failure."""
        return process.tail()

    @property
    def display_name(self) -> str:
        """The name in error messages."""
        return self.name

    @property
    def process(self) -> ChildProcess:
        """The process of the last start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def launch(self) -> None:
        """Start the server and wait until it serves. Raises ProcessFailed, with its output, if it fails."""
        if self.is_running:
            raise RuntimeError(f"{self.name} is already running")
        for port in self.listen_ports():
            # Otherwise, `is_serving` might reach the other program and take it for this server.
            if not is_port_free(port):
                reason = f"cannot start: port {port} is taken by another program"
                raise ProcessFailed(self.display_name, reason, "")
        await self.prepare()
        process = self._process = ChildProcess(
            self.name, self.command(), directory=self.directory, env=self.environment()
        )
        try:
            await self._wait_until_serving(process)
        except BaseException:
            await process.kill()
            raise

    async def kill(self) -> None:
        await self.process.kill()

    async def terminate(self, grace: float | None = None) -> int:
        """Send SIGTERM and, if the server still runs after `grace` seconds, SIGKILL. Return the exit code."""
        return await self.process.terminate(self.stop_timeout if grace is None else grace)

    async def restart(self) -> None:
        """Start the server again with the same ports and data. Stop it first if it is running."""
        if self.is_running:
            await self.terminate()
        await self.launch()

    async def wait_for_failure(self) -> ProcessFailed:
        """Wait until the process exits, and return the exit as an error with the last output."""
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

    async def __aexit__(self, *_: object) -> None:
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
                reason = f"did not start: it {describe_exit(code)}"
                raise ProcessFailed(self.display_name, reason, self.failure_summary(process))
            with suppress(OSError):
                if await self.is_serving():
                    return
            if time.monotonic() > deadline:
                reason = f"did not serve within {self.start_timeout_seconds:.0f} s"
                raise ProcessFailed(self.display_name, reason, self.failure_summary(process))
            await asyncio.sleep(_POLL_SECONDS)


async def launch_all(servers: Sequence[Server]) -> None:
    """Start servers in parallel. The first failure cancels the other starts and is raised alone."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(server.launch())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def stop_all(servers: Sequence[Server], *, gracefully: bool) -> None:
    """Stop all running servers in parallel."""
    running = [server for server in servers if server.is_running]
    await asyncio.gather(*(server.terminate() if gracefully else server.kill() for server in running))

"""The `mariadb` command on a pseudo-terminal, where Ctrl-C kills the statement that runs."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

_PROMPT = "ready> "
_RESULT = re.compile(rb"rows? in set|Query OK|ERROR \d+")
_START_SECONDS = 30.0


class MySqlTerminal:
    """One client with one session. A statement is written with `start`, and ends with `wait_for_result`."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self._process, self._descriptor = process, descriptor
        self._output = bytearray()
        self._has_output = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        except OSError:  # the client has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._output += data
        self._has_output.set()

    def start(self, statement: str) -> None:
        """Send a statement, which must end with a semicolon."""
        self._output.clear()
        os.write(self._descriptor, f"{statement}\n".encode())

    def press_ctrl_c(self) -> None:
        """Send SIGINT, as the terminal does. The client opens a connection and sends KILL QUERY."""
        self._process.send_signal(signal.SIGINT)

    @property
    def has_result(self) -> bool:
        """Whether the statement has ended."""
        return self._result() is not None

    @property
    def text(self) -> str:
        """What the client has written since the start of the statement."""
        return self._output.decode(errors="replace")

    async def wait_for_result(self, seconds: float) -> str:
        """Wait until the statement ends; return the client's output. Raises TimeoutError."""
        await self._wait(lambda: self.has_result, seconds)
        return self.text

    async def wait_for_prompt(self) -> None:
        await self._wait(lambda: _PROMPT.encode() in self._output, _START_SECONDS)

    def _result(self) -> re.Match[bytes] | None:
        # The prompt follows the result, so that the next statement is not written before the client reads it.
        found = _RESULT.search(self._output)
        return found if found and _PROMPT.encode() in self._output[found.end() :] else None

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._has_output.clear()
                await self._has_output.wait()

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        os.close(self._descriptor)


@asynccontextmanager
async def run_mysql_terminal(port: int) -> AsyncIterator[MySqlTerminal]:
    """Run a client that has logged in as root."""
    own_end, client_end = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *("mariadb", "--no-defaults", "--host=127.0.0.1", f"--port={port}", "--user=root"),
            *("--skip-auto-rehash", "--skip-reconnect", "--skip-ssl", f"--prompt={_PROMPT}"),
            stdin=client_end,
            stdout=client_end,
            stderr=client_end,
            env={**os.environ, "TERM": "dumb", "MYSQL_HISTFILE": "/dev/null"},
            start_new_session=True,
        )
    finally:
        os.close(client_end)
    terminal = MySqlTerminal(process, own_end)
    try:
        await terminal.wait_for_prompt()
        yield terminal
    finally:
        await terminal.close()

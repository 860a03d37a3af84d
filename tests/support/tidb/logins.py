"""Logins through Envoy while a drill breaks servers, and the errors that they get."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.background import run_in_background
from tests.support.tidb_sim_clients import RawClient, error_code

_PAUSE_SECONDS = 0.1


class LoginRejected(Exception):
    """The login got a MySQL error. The arguments are its code and text."""


async def log_in(port: int, timeout_seconds: float = 30.0) -> RawClient:
    """Open a session of root. Raises LoginRejected, OSError, IncompleteReadError or TimeoutError."""
    async with asyncio.timeout(timeout_seconds):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = RawClient(reader, writer)
        try:
            _, answer = await client.read_packet()
            if answer[0] != 0xFF:  # a greeting, no error
                answer = await client.send_login()
            if code := error_code(answer):
                # The text comes after the code and the SQLSTATE.
                raise LoginRejected(code, answer[9:].decode(errors="replace"))
        except BaseException:
            writer.transport.abort()
            raise
        return client


def describe(error: BaseException) -> str:
    """Return the code of a MySQL error, else the kind of the error."""
    return str(error.args[0]) if isinstance(error, LoginRejected) else type(error).__name__


class LoginProbe:
    """Logs in ten times a second, and records failures and the longest login."""

    def __init__(self) -> None:
        self.successes = 0
        self.errors: list[str] = []
        """One text for each error: seconds after the start, and the error."""
        self.longest_seconds = 0.0

    @classmethod
    @asynccontextmanager
    async def run(cls, port: int) -> AsyncIterator[LoginProbe]:
        """Log in again and again until the end of the block."""
        probe = cls()
        async with run_in_background(probe._run(port)):
            yield probe

    async def _run(self, port: int) -> None:
        first_at = time.monotonic()
        while True:
            started_at = time.monotonic()
            try:
                client = await log_in(port)
            except (LoginRejected, OSError, EOFError, TimeoutError) as error:
                self.errors.append(f"{time.monotonic() - first_at:.1f} {error!r}")
            else:
                client.writer.transport.abort()
                self.successes += 1
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - started_at)
            await asyncio.sleep(_PAUSE_SECONDS)

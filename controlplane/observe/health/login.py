"""Logs in to a node as a SQL client and runs a statement: for health checks and for rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pymysql

from controlplane import address as addresses
from controlplane.aio import ThreadPool
from controlplane.config.login import LoginSettings
from controlplane.errors import TidevoyError
from controlplane.observe.health.probes import LOCAL_RESOURCE_ERRNOS, PROXY_LOCAL

_MAX_PASSWORD_BYTES = 4096


class UnusableLogin(TidevoyError):
    """The settings of the login are unusable."""


class NotMySql(TidevoyError):
    """The node responds with something other than MySQL."""


class ConnectTimeout(TimeoutError):
    """The node accepts no connection in time. The message continues the name of the node."""


async def run_statement(
    threads: ThreadPool,
    endpoint: str,
    host: str,
    login: LoginSettings,
    timeout: float,
    *,
    proxy_protocol: bool,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Open a session at `endpoint` (ip:port), run the statement, and close the session.

    `host` is the name in the node's certificate. Connecting needs no thread and may take up to `timeout`
    seconds. Then login and statement block one of the `threads`, and may take up to `timeout` seconds from
    `on_start` on. Raises ConnectTimeout, TimeoutError, pymysql.MySQLError, OSError, UnusableLogin or NotMySql
    if this fails, and RuntimeError if this machine is short of threads.
    """
    loop = asyncio.get_running_loop()
    ip, port = addresses.split(endpoint)
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout):
                await loop.sock_connect(connection, (ip, port))
        except TimeoutError:
            raise ConnectTimeout(f"does not accept connections within {timeout:g} s") from None
        except OSError as error:  # asyncio's text does not say why
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        login_attempt = _LoginAttempt(connection.dup(), host, port, login, timeout, proxy_protocol)

        def start_timer() -> None:
            on_start()
            # PyMySQL's timeouts apply to single reads and writes, so they do not end a slow sequence of them.
            timers.append(loop.call_later(timeout, _shut_down, connection))

        timers: list[asyncio.TimerHandle] = []
        try:
            await threads.run(login_attempt.run, lambda: loop.call_soon_threadsafe(start_timer))
        finally:
            for timer in timers:
                timer.cancel()
            # If this task is cancelled, this ends the call that the thread waits for. Only this task closes
            # `connection`, so its descriptor cannot belong to something else.
            _shut_down(connection)
            if not login_attempt.has_started:
                login_attempt.connection.close()


@dataclass
class _LoginAttempt:
    """One login, in a thread, over a duplicate of the connection; it closes the duplicate."""

    connection: socket.socket
    host: str
    port: int
    login: LoginSettings
    timeout: float
    proxy_protocol: bool
    has_started: bool = False

    def run(self, on_start: Callable[[], object]) -> None:
        self.has_started = True
        deadline = time.monotonic() + self.timeout
        on_start()
        with self.connection:
            self.connection.settimeout(self.timeout)
            try:
                self._run_statement(*self._read_files())
            except (UnusableLogin, NotMySql):
                raise
            except Exception as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no response within {self.timeout:g} s") from error
                if isinstance(error, pymysql.MySQLError | OSError | RuntimeError):
                    raise
                # PyMySQL parses data that is not MySQL, and fails in arbitrary ways.
                raise NotMySql(f"its response is not MySQL ({type(error).__name__})") from error

    def _read_files(self) -> tuple[bytes, ssl.SSLContext | None]:
        ca = self.login.ca
        try:
            password = _read_password(self.login.password_file)
            return password, None if ca is None else ssl.create_default_context(cafile=ca)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in LOCAL_RESOURCE_ERRNOS:
                raise
            raise UnusableLogin(str(error)) from error

    def _run_statement(self, password: bytes, context: ssl.SSLContext | None) -> None:
        if self.proxy_protocol:
            self.connection.sendall(PROXY_LOCAL)
        session = pymysql.Connection(
            host=self.host,
            port=self.port,
            user=self.login.user,
            # As bytes: PyMySQL encodes text as Latin-1.
            password=password,
            ssl=context,
            # Otherwise PyMySQL loads the system's CAs each time (19 ms), and uses TLS without verification.
            ssl_disabled=context is None,
            read_timeout=self.timeout,
            write_timeout=self.timeout,
            autocommit=True,
            defer_connect=True,
        )
        session.connect(self.connection)
        with contextlib.closing(session), session.cursor() as cursor:
            cursor.execute(self.login.statement)
            cursor.fetchall()


def _shut_down(connection: socket.socket) -> None:
    """Shut the connection down, which ends the call that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read_password(path: Path | None) -> bytes:
    if path is None:
        return b""
    with path.open("rb") as file:
        return file.read(_MAX_PASSWORD_BYTES).rstrip(b"\r\n")

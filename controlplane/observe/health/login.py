"""Logs in to a node as a SQL client and runs a statement: for health checks and for rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from pathlib import Path

import pymysql

from controlplane import address as addresses
from controlplane.aio import ThreadPool
from controlplane.config.login import LoginSettings
from controlplane.errors import TidevoyError
from controlplane.observe.health.probes import PROXY_LOCAL

_MAX_PASSWORD_BYTES = 4096


class UnusableLogin(TidevoyError):
    """The settings of the login are unusable."""


class NotMySql(TidevoyError):
    """The node responds with something other than MySQL."""


async def run_statement(
    threads: ThreadPool,
    endpoint: str,
    host: str,
    login: LoginSettings,
    timeout: float,
    *,
    proxy_protocol: bool,
) -> None:
    """Open a session at `endpoint` (ip:port), run the statement, and close the session.

    `host` is the name in the node's certificate. Blocks one of the `threads`. Raises TimeoutError if this
    takes longer than `timeout`, pymysql.MySQLError, OSError, UnusableLogin or NotMySql if it fails.
    """
    loop = asyncio.get_running_loop()
    await threads.run(_run_statement, loop, endpoint, host, login, timeout, proxy_protocol)


def _run_statement(
    loop: asyncio.AbstractEventLoop,
    endpoint: str,
    host: str,
    login: LoginSettings,
    timeout: float,
    proxy_protocol: bool,
) -> None:
    try:
        password = _read_password(login.password_file)
        context = ssl.create_default_context(cafile=login.ca) if login.ca is not None else None
    except (OSError, ValueError) as error:
        raise UnusableLogin(str(error)) from error
    ip, port = addresses.split(endpoint)
    deadline = time.monotonic() + timeout
    with socket.create_connection((ip, port), timeout) as plain, plain.dup() as handle:
        # PyMySQL's timeouts apply to single reads and writes, so they do not end a slow sequence of them.
        loop.call_soon_threadsafe(loop.call_later, deadline - time.monotonic(), _shut_down, handle)
        if proxy_protocol:
            plain.sendall(PROXY_LOCAL)
        session = pymysql.Connection(
            host=host,
            port=port,
            user=login.user,
            password=password,
            ssl=context,
            # Otherwise PyMySQL loads the system's CAs each time (19 ms), and uses TLS without verification.
            ssl_disabled=context is None,
            read_timeout=timeout,
            write_timeout=timeout,
            autocommit=True,
            defer_connect=True,
        )
        try:
            session.connect(plain)
            with contextlib.closing(session), session.cursor() as cursor:
                cursor.execute(login.statement)
                cursor.fetchall()
        except Exception as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no response within {timeout:g} s") from error
            if isinstance(error, pymysql.MySQLError | OSError | RuntimeError):
                raise
            # PyMySQL parses data that is not MySQL, and fails in arbitrary ways.
            raise NotMySql(f"its response is not MySQL ({type(error).__name__})") from error


def _shut_down(handle: socket.socket) -> None:
    """Shut the connection down, which ends the call that waits for it. Does nothing if it is closed."""
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


def _read_password(path: Path | None) -> str:
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_PASSWORD_BYTES).decode().rstrip("\r\n")

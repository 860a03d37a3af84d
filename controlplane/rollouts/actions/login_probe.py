"""A session on a node that came back: whether somebody can log in there, and a statement succeeds."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pymysql

from controlplane import address as addresses
from controlplane.config.rollouts import LoginProbeSettings

# PROXY protocol v2, command LOCAL: "a connection of the proxy itself" (haproxy.org, proxy-protocol.txt, 2.2).
_PROXY_LOCAL = b"\r\n\r\n\x00\r\nQUIT\n" + bytes([0x20, 0x00, 0x00, 0x00])
_MAX_PASSWORD_BYTES = 4096  # bytes
_MAX_ERROR_CHARS = 200  # characters of what the node said


async def probe_login(endpoint: str, host: str, probe: LoginProbeSettings, *, proxy_protocol: bool) -> str:
    """Open a session at `ip:port` and run the statement; why that failed, as "its ...", or nothing.

    `host` is the name in the node's certificate. In a thread, each step of which ends in time by itself.
    """
    return await asyncio.to_thread(_probe_login, endpoint, host, probe, proxy_protocol)


def _probe_login(endpoint: str, host: str, probe: LoginProbeSettings, proxy_protocol: bool) -> str:
    try:
        password = _read_password(probe.password_file)
        context = ssl.create_default_context(cafile=probe.ca) if probe.ca is not None else None
    except (OSError, ValueError) as error:
        return f"cannot be logged in to: {error}"
    ip, port = addresses.split(endpoint)
    try:
        with socket.create_connection((ip, port), probe.timeout) as plain:
            if proxy_protocol:
                plain.sendall(_PROXY_LOCAL)
            session = pymysql.Connection(
                host=host,
                port=port,
                user=probe.user,
                password=password,
                ssl=context,
                connect_timeout=probe.timeout,
                read_timeout=probe.timeout,
                write_timeout=probe.timeout,
                autocommit=True,
                defer_connect=True,
            )
            session.connect(plain)
            try:
                with session.cursor() as cursor:
                    cursor.execute(probe.statement)
                    cursor.fetchall()
            finally:
                session.close()
    except pymysql.MySQLError as error:
        return f"cannot be logged in to, or the statement fails: {_printable(str(error))}"
    except (OSError, RuntimeError) as error:
        return f"cannot be logged in to: {_printable(str(error))}"
    except Exception as error:  # PyMySQL reads on in what is no MySQL, and fails in as many ways
        return f"cannot be logged in to: its answer is no MySQL ({type(error).__name__})"
    return ""


def _read_password(path: Path | None) -> str:
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_PASSWORD_BYTES).decode().rstrip("\r\n")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_ERROR_CHARS])

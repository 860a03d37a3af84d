"""The login probe of a returned node: opens a session and runs a statement."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import pymysql

from controlplane import address as addresses
from controlplane.aio import ThreadPool
from controlplane.config.rollouts import LoginProbeSettings

# PROXY protocol v2, command LOCAL: "a connection of the proxy itself" (haproxy.org, proxy-protocol.txt, 2.2).
_PROXY_LOCAL = b"\r\n\r\n\x00\r\nQUIT\n" + bytes([0x20, 0x00, 0x00, 0x00])
_THREADS = ThreadPool("login probe", 8)
_MAX_PASSWORD_BYTES = 4096
_MAX_ERROR_CHARS = 200  # of the node's error message


async def probe_login(endpoint: str, host: str, probe: LoginProbeSettings, *, proxy_protocol: bool) -> str:
    """Open a session at `endpoint` (ip:port), run the statement; return why this failed, or an empty string.

    The reason is a clause about the node. `host` is the name in the node's certificate. The probe runs in a
    thread, in which each operation has its own timeout.
    """
    return await _THREADS.run(_probe_login, endpoint, host, probe, proxy_protocol)


def _probe_login(endpoint: str, host: str, probe: LoginProbeSettings, proxy_protocol: bool) -> str:
    try:
        password = _read_password(probe.password_file)
        context = ssl.create_default_context(cafile=probe.ca) if probe.ca is not None else None
    except (OSError, ValueError) as error:
        return f"cannot be probed: {error}"
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
            with contextlib.closing(session), session.cursor() as cursor:
                cursor.execute(probe.statement)
                cursor.fetchall()
    except (pymysql.MySQLError, OSError, RuntimeError) as error:
        return f"failed the login probe: {_printable(str(error))}"
    except Exception as error:  # PyMySQL parses non-MySQL data and fails in arbitrary ways
        return f"failed the login probe: its response is not MySQL ({type(error).__name__})"
    return ""


def _read_password(path: Path | None) -> str:
    if path is None:
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_PASSWORD_BYTES).decode().rstrip("\r\n")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_ERROR_CHARS])

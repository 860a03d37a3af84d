"""Two of the probes of a node: `GET /status` on the status port, and the MySQL greeting on the SQL port.

A probe returns a `ProbeResult` whatever the node does. It raises only `LocalResourceError`, if this machine
cannot probe. One event loop probes thousands of nodes every second, so probes must be cheap: the connection
to the status port stays open, and this module implements the necessary part of HTTP/1.1. Measured on one
core: a status probe takes 35 us on an open connection and 280 us on a new connection (with httpx2: 830 us and
1,120 us). A greeting takes 130 us on a bare socket (with asyncio streams: 220 us).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from controlplane import address as addresses
from controlplane.errors import TidevoyError
from controlplane.model.health import CheckStatus
from controlplane.observe.health.client_tls import ReloadingClientContext

_MAX_HEAD_BYTES = 16 * 1024
_MAX_BODY_BYTES = 64 * 1024
_MAX_GREETING_BYTES = 16 * 1024
_TOO_LONG_MESSAGE = "answers with more data than TiDB's status has"
_NOT_HTTP_MESSAGE = "answers with something other than HTTP"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |$)")
_DIGITS = {10: re.compile(rb"[0-9]{1,15}"), 16: re.compile(rb"[0-9A-Fa-f]{1,15}")}

# PROXY protocol v2, command LOCAL: a connection of the proxy itself (haproxy.org, proxy-protocol.txt, 2.2).
PROXY_LOCAL = b"\r\n\r\n\x00\r\nQUIT\n" + bytes([0x20, 0x00, 0x00, 0x00])

_FILE_LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)
LOCAL_RESOURCE_ERRNOS = (*_FILE_LIMIT_ERRNOS, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class LocalResourceError(TidevoyError):
    """This machine lacks a resource for probing, so the health of the node is unknown."""

    def __init__(self, target: str, error: OSError) -> None:
        remedy = (
            "increase the control plane's limit of open files (LimitNOFILE, ulimit -n)"
            if error.errno in _FILE_LIMIT_ERRNOS
            else "free memory or local ports on this machine"
        )
        super().__init__(f"{target} cannot be checked: {error.strerror}; {remedy}")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe; `connections` and `version` are set only if the node reported them."""

    status: CheckStatus
    reason: str
    connections: int | None = None
    version: str = ""


class _ProbeFailure(Exception):
    """The node fails the probe. The message continues the name of the port: "... refuses connections"."""


class Probe:
    """A probe of one port of one node."""

    _on_silence: ClassVar[str]  # failure message for a timeout after the node accepted the connection
    _on_eof: ClassVar[str]  # failure message if the node closes the connection

    def __init__(self, endpoint: str, port_name: str) -> None:
        """`endpoint`: `ip:port`."""
        self._ip, self._port = addresses.split(endpoint)
        self._port_name = port_name
        self._is_connected = False
        self.started_at = 0.0
        """The time of the event loop from which on `timeout` counts."""
        self.min_interval = 0.0
        """Seconds between two probes if this is longer than the interval in the settings."""

    async def run(self, timeout: float) -> ProbeResult:
        """Probe once, within `timeout` seconds. Raises LocalResourceError if this machine cannot probe."""
        self._is_connected = False
        self.started_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout):
                return await self._attempt()
        except TimeoutError:
            failure = self._on_silence if self._is_connected else "does not accept connections"
            failure += f" within {timeout:g} s"
        except _ProbeFailure as error:
            failure = str(error)
        except EOFError:
            failure = self._on_eof
        except OSError as error:
            failure = describe_error(error, self._port_name)
        return ProbeResult(CheckStatus.FAIL, f"{self._port_name} {failure}")

    def close(self) -> None:
        """Close the connection, if one is open."""

    async def _attempt(self) -> ProbeResult:
        """Probe without a timeout. Raises _ProbeFailure, EOFError or OSError."""
        raise NotImplementedError


class StatusProbe(Probe):
    """`GET /status` of one node, over one connection that stays open between probes.

    TiDB answers 200 with JSON `connections` and `version`, or 500 without a body while it starts up or shuts
    down (pingcap/tidb pkg/server/http_status.go). GreetingProbe checks whether TiDB accepts connections.
    """

    _on_silence = "accepts connections but does not answer"
    _on_eof = (
        "closes connections before a complete response (is TLS, health.status.tls, on at one side only?)"
    )

    def __init__(self, endpoint: str, host: str, tls: ReloadingClientContext | None) -> None:
        """`host`: the name for the `Host` header and the certificate."""
        authority = addresses.join(host, addresses.split(endpoint)[1])
        super().__init__(endpoint, f"{'https' if tls else 'http'}://{authority}/status")
        self._host = host
        self._tls = tls
        self._headers = f"HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: tidevoy\r\n\r\n"
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, timeout: float) -> ProbeResult:
        """Probe once, within `timeout` seconds. Raises LocalResourceError if this machine cannot probe."""
        result = await super().run(timeout)
        if self._tls is not None and self._tls.problem:
            reason = f"{result.reason}; health.status.client_tls: {self._tls.problem}"
            return replace(result, reason=reason)
        return result

    async def fetch_config(self, timeout: float) -> bytes | None:
        """Return the response body of `GET /config`, the node's configuration; None if that fails."""
        try:
            async with asyncio.timeout(timeout):
                code, body = await self._get("/config")
        except (TimeoutError, _ProbeFailure, OSError, EOFError):
            return None
        return body if code == 200 else None

    def close(self) -> None:
        """Abort the open connection."""
        if self._stream is not None:
            self._stream[1].transport.abort()
            self._stream = None

    async def _attempt(self) -> ProbeResult:
        return _evaluate_status(*await self._get("/status"), self._port_name)

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Return status code and body. Closes the connection on failure or cancellation."""
        try:
            if self._stream is not None:
                try:
                    return await self._exchange(*self._stream, path)
                except (ConnectionError, EOFError):
                    # The server may have closed the idle connection. Try a new connection.
                    self.close()
            self._stream = await asyncio.open_connection(
                self._ip,
                self._port,
                limit=_MAX_HEAD_BYTES,
                ssl=self._tls.current() if self._tls else None,
                server_hostname=self._host if self._tls else None,
            )
            return await self._exchange(*self._stream, path)
        except BaseException:
            self._is_connected = self._stream is not None
            self.close()
            raise

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str
    ) -> tuple[int, bytes]:
        writer.write(f"GET {path} {self._headers}".encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _ProbeFailure(_NOT_HTTP_MESSAGE) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise EOFError from None
            raise _ProbeFailure(f"{_NOT_HTTP_MESSAGE}, or with an incomplete response") from None
        lines = head.split(b"\r\n")
        status = _STATUS_LINE.match(lines[0])
        if status is None:
            raise _ProbeFailure(_NOT_HTTP_MESSAGE)
        pairs = (line.partition(b":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        body, is_at_end = await _read_body(reader, headers)
        if is_at_end or headers.get(b"connection") == b"close":
            self.close()
        return int(status[1]), body


def _evaluate_status(code: int, body: bytes, url: str) -> ProbeResult:
    if code == 500:
        reason = f"reports that it is starting up or shutting down (HTTP 500 from {url})"
        return ProbeResult(CheckStatus.STOPPING, reason)
    if code != 200:
        raise _ProbeFailure(f"answers HTTP {code}, which TiDB's status port never does")
    try:
        document = json.loads(body)
        connections, version = document["connections"], document["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        connections = version = None
    if type(connections) is not int or not isinstance(version, str):
        raise _ProbeFailure("answers, but not with TiDB's status as JSON")
    return ProbeResult(CheckStatus.PASS, f"{url} answers", connections, printable(version))


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> tuple[bytes, bool]:
    """Return the body, and whether the server closed the connection after it (RFC 9112, 6 and 7.1)."""
    body = b""
    if headers.get(b"transfer-encoding", b"identity") != b"identity":
        while size := _parse_length(await _read_line(reader), 16, len(body)):
            body += await reader.readexactly(size)
            await _read_line(reader)
        while await _read_line(reader):
            pass  # trailers, up to the empty line
        return body, False
    if b"content-length" in headers:
        return await reader.readexactly(_parse_length(headers[b"content-length"], 10)), False
    while part := await reader.read(_MAX_HEAD_BYTES):
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise _ProbeFailure(_TOO_LONG_MESSAGE)
    return body, True


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n")).strip()
    except asyncio.LimitOverrunError:
        raise _ProbeFailure("answers with malformed HTTP") from None


def _parse_length(text: bytes, base: int, received: int = 0) -> int:
    """Return the length of a body, or of a chunk after `received` bytes of a body."""
    digits = text.partition(b";")[0].strip()
    if not _DIGITS[base].fullmatch(digits):
        raise _ProbeFailure("answers with malformed HTTP")
    length = int(digits, base)
    if received + length > _MAX_BODY_BYTES:
        raise _ProbeFailure(_TOO_LONG_MESSAGE)
    return length


class GreetingProbe(Probe):
    """Connects to the SQL port of one node and expects the greeting of a MySQL server.

    A TCP connection alone does not prove that TiDB serves: without PD, TiDB closes new connections at once.
    With too many connections, it sends an ERR packet (pingcap/tidb pkg/server/server.go, conn.go).
    """

    _on_silence = "accepts connections but sends no greeting"
    _on_eof = "closes connections without a greeting (TiDB does so when it has lost PD)"

    def __init__(self, endpoint: str, *, proxy_protocol: bool) -> None:
        """`proxy_protocol`: send a PROXY v2 header first, as the Envoys do."""
        super().__init__(endpoint, f"the SQL port {endpoint}")
        self._proxy_protocol = proxy_protocol

    async def _attempt(self) -> ProbeResult:
        """Read the greeting.

        All data is read before the connection is closed, so that the kernel sends FIN. An RST would cause a
        warning in TiDB's log.
        """
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, (self._ip, self._port))
            self._is_connected = True
            if self._proxy_protocol:
                await loop.sock_sendall(connection, PROXY_LOCAL)
            return evaluate_greeting(await self._read_first_packet(connection), self._port_name)

    async def _read_first_packet(self, connection: socket.socket) -> bytes:
        """Return the payload of the first packet, after its 3-byte length and 1-byte sequence number."""
        loop = asyncio.get_running_loop()
        data = b""
        expected = 4
        while len(data) < expected:
            part = await loop.sock_recv(connection, _MAX_GREETING_BYTES)
            if not part:
                if data:
                    raise _ProbeFailure("closes connections in the middle of its greeting")
                raise EOFError
            data += part
            if len(data) >= 4:
                expected = 4 + int.from_bytes(data[:3], "little")
                if expected > _MAX_GREETING_BYTES or expected == 4:
                    text = printable(data[:16])
                    raise _ProbeFailure(f"greets with {text!r}, which is not the MySQL protocol")
        return data[4:expected]


def evaluate_greeting(packet: bytes, port_name: str) -> ProbeResult:
    """Evaluate the first packet of a connection; `packet` is its payload, at least one byte.

    A greeting is `0a`, version, NUL, and other fields. An error is `ff`, code (2 bytes, little endian),
    optionally `#` and a 5-byte SQLSTATE, and text (dev.mysql.com, Protocol::HandshakeV10 and ERR_Packet).
    """
    if packet[0] == 0xFF and len(packet) >= 3:
        code = int.from_bytes(packet[1:3], "little")
        text = packet[9:] if packet[3:4] == b"#" else packet[3:]
        return ProbeResult(CheckStatus.FAIL, f"{port_name} rejects sessions: error {code}, {printable(text)}")
    version, terminator, _ = packet[1:].partition(b"\0")
    if packet[0] != 10 or not terminator:
        return ProbeResult(CheckStatus.FAIL, f"{port_name} sends a first packet that is not a MySQL greeting")
    return ProbeResult(CheckStatus.PASS, f"{port_name} greets", version=printable(version))


def printable(text: str | bytes) -> str:
    """Make text from the network safe for a log line: at most 200 characters, no control characters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def describe_error(error: OSError, target: str) -> str:
    """Describe a connection error; the text continues the name of the target.

    Raises LocalResourceError if this machine causes the error.
    """
    match error:
        case ConnectionRefusedError():
            return "refuses connections"
        case ConnectionError():
            return "resets connections"
        case ssl.SSLCertVerificationError():
            return f"presents a certificate that cannot be trusted: {error.verify_message}"
        case ssl.SSLError():
            return f"fails with a TLS error: {error.reason or error}"
    if error.errno in LOCAL_RESOURCE_ERRNOS:
        raise LocalResourceError(target, error)
    return f"cannot be reached: {os.strerror(error.errno) if error.errno else error}"

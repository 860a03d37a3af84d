"""A control plane with authentication, for tests of its access control."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from api.auth.credentials import new_token, sha256
from controlplane import address as addresses
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, settings

OPERATOR_TOKEN, VIEWER_TOKEN, UNKNOWN_TOKEN = new_token(), new_token(), new_token()
TOKENS = [
    {"name": "anna", "role": "operator", "sha256": sha256(OPERATOR_TOKEN.encode())},
    {"name": "vera", "role": "viewer", "sha256": sha256(VIEWER_TOKEN.encode())},
]


def settings_with_tokens(directory: Path, ports: Ports, **api: Any) -> Settings:
    """Return settings with TOKENS. Keyword arguments are further keys of the section `api`."""
    section = {"listen": f"127.0.0.1:{ports.allocate()}", "tokens": TOKENS, **api}
    return settings(directory, ports, ["127.0.0.1:4000"], api=section)


def bearer_header(token: str) -> dict[str, str]:
    """Return the header with a token."""
    return {"authorization": f"Bearer {token}"}


class HttpConnection:
    """A raw connection to the REST server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: ApiServer, source: str = "127.0.0.1") -> HttpConnection:
        """Connect from `source`, an address of this machine. Raises OSError or TimeoutError."""
        host, port = addresses.split(server.url.partition("://")[2])
        async with asyncio.timeout(5):
            return cls(*await asyncio.open_connection(host, port, local_addr=(source, 0)))

    def send(self, method: str, path: str, *fields: str) -> None:
        """Send a request without a body."""
        head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: here", *fields))
        self.writer.write(head.encode() + b"\r\n")

    async def request(self, method: str, path: str, *fields: str) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, header fields (lower case) and body of the response."""
        self.send(method, path, *fields)
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = int(head.split(" ", 2)[1])
            headers = {k.lower(): v for k, v in re.findall(r"^([^:\r\n]+): (.*?)\r?$", head, re.MULTILINE)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return status, headers, body

    async def read_to_end(self, seconds: float = 10.0) -> bytes:
        """Return the data until the server closes the connection, or nothing if the server resets it."""
        async with asyncio.timeout(seconds):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def __aenter__(self) -> HttpConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        transport: asyncio.WriteTransport = self.writer.transport
        transport.abort()

"""Clients of a stand-in in this process: a driver, and one that can send anything."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncmy

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.backing import BackingAddress
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD
from sandbox.tidb_sim.packets import Capability, frame
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules

CAPABILITIES = (
    Capability.PROTOCOL_41
    | Capability.SECURE_CONNECTION
    | Capability.PLUGIN_AUTH
    | Capability.MULTI_STATEMENTS
    | Capability.MULTI_RESULTS
)


def rules_for(mariadb: MariaDb, **values: Any) -> SessionRules:
    """Sessions on that MariaDB; `values` as in SessionRules."""
    return SessionRules(BackingAddress(socket=str(mariadb.socket)), **values)


async def connect(sim: TidbSim, **options: Any) -> Any:
    """A connection of a driver, as root unless `options` (of asyncmy.connect) say otherwise."""
    host, port = sim.sql_address.split(":")
    return await asyncmy.connect(
        **{"host": host, "port": int(port), "user": "root", "autocommit": True, **options}
    )


class Raw:
    """A client that can send anything, and sees each packet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def packet(self) -> tuple[int, bytes]:
        """Sequence number and payload."""
        header = await self.reader.readexactly(4)
        return header[3], await self.reader.readexactly(int.from_bytes(header[:3], "little"))

    async def login(self, capabilities: Capability = CAPABILITIES, plugin: str = NATIVE_PASSWORD) -> bytes:
        """Log in as root; the payload of the answer."""
        await self.packet()
        head = struct.pack("<IIB23x", capabilities, 1 << 24, 45)
        self.writer.write(frame(1, head + b"root\0\0" + plugin.encode() + b"\0"))
        return (await self.packet())[1]

    async def command(self, command: int, body: bytes = b"") -> bytes:
        """Send one request; the payload of its first answer."""
        self.writer.write(frame(0, bytes((command,)) + body))
        sequence, payload = await self.packet()
        assert sequence == 1
        return payload

    async def until(self, size: int) -> list[bytes]:
        """Payloads up to one that begins with 0xfe and is no longer than `size`."""
        payloads: list[bytes] = []
        while not payloads or payloads[-1][0] != 0xFE or len(payloads[-1]) > size:
            payloads.append((await self.packet())[1])
        return payloads


@asynccontextmanager
async def raw(sim: TidbSim) -> AsyncIterator[Raw]:
    """A connection that has sent nothing yet, closed at the end."""
    host, port = sim.sql_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()

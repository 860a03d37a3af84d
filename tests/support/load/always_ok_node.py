"""A light stand-in for a node under a storm of logins: it greets, lets everybody in, and says OK to all.

MariaDB does not reach a thousand logins a second on two cores that it shares with Envoy and the clients. What
a login costs the node does not matter here; that all of its messages are there does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, new_salt
from sandbox.tidb_sim.packets import HEADER_SIZE, Command, frame, read_nul_bytes
from tests.support.module.envoy import OK, greets

SWITCHED = "switch"
"""A user who is asked for another authentication plugin."""
_SWITCH = b"\xfe" + NATIVE_PASSWORD.encode() + b"\0" + new_salt() + b"\0"
_USER_AT = 32  # in a HandshakeResponse41


class ScriptedNode:
    """Counts what it saw: connections, those that are open, logins that it agreed to, queries."""

    def __init__(self, halved: float | None) -> None:
        self.halved = halved
        self.endpoint = ""
        self.connections = 0
        self.open = 0
        self.logins = 0
        self.queries = 0


class _Connection(asyncio.Protocol):
    """One connection to it."""

    def __init__(self, node: ScriptedNode) -> None:
        self._node = node
        self._buffer = bytearray()
        self._switching = False
        self._in = False
        self._later: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._node.connections += 1
        self._node.open += 1
        greeting = greets()
        if self._node.halved is None:
            transport.write(greeting)
        else:
            half = len(greeting) // 2
            transport.write(greeting[:half])
            self._later = asyncio.get_running_loop().call_later(
                self._node.halved, transport.write, greeting[half:]
            )

    def connection_lost(self, error: Exception | None) -> None:
        self._node.open -= 1
        if self._later is not None:
            self._later.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER_SIZE:
            length = int.from_bytes(self._buffer[:3], "little")
            if len(self._buffer) < HEADER_SIZE + length:
                return
            sequence = self._buffer[3]
            payload = bytes(self._buffer[HEADER_SIZE : HEADER_SIZE + length])
            del self._buffer[: HEADER_SIZE + length]
            self._answer(payload, sequence)

    def _answer(self, payload: bytes, sequence: int) -> None:
        if self._in:
            if payload[0] == Command.QUIT:
                self._transport.close()
            else:
                self._node.queries += 1
                self._transport.write(frame(1, OK))
        elif not self._switching and read_nul_bytes(payload, _USER_AT)[0] == SWITCHED.encode():
            self._switching = True
            self._transport.write(frame(sequence + 1, _SWITCH))
        else:
            self._in = True
            self._node.logins += 1
            self._transport.write(frame(sequence + 1, OK))


@asynccontextmanager
async def scripted_node(halved: float | None = None) -> AsyncIterator[ScriptedNode]:
    """A node on a port of its own. `halved`: seconds between two halves of its greeting, if it has them."""
    node = ScriptedNode(halved)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(node), "127.0.0.1", 0, backlog=4096)
    node.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield node
    finally:
        server.close()

"""A fast fake node for a storm of logins: it accepts every login and answers OK to every command.

MariaDB is too slow: on two cores shared with Envoy and the clients, it does not reach 1,000 logins a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, new_salt
from sandbox.tidb_sim.packets import HEADER_SIZE, MySqlCommand, frame, read_nul_bytes
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet
from tests.support.waiting import wait_until

AUTH_SWITCH_USER = "switch"
"""A user for whom the node requests another authentication plugin."""
_AUTH_SWITCH_REQUEST = b"\xfe" + NATIVE_PASSWORD.encode() + b"\0" + new_salt() + b"\0"
_USER_OFFSET = 32  # Offset of the user in a HandshakeResponse41.


class FastLoginNode:
    """The node's address, and counts of open connections and accepted logins."""

    def __init__(self, greeting_pause_seconds: float | None) -> None:
        self.greeting_pause_seconds = greeting_pause_seconds
        self.endpoint = ""
        self.login_count = 0
        self.transports: set[asyncio.Transport] = set()

    @property
    def open_connections(self) -> int:
        return len(self.transports)


class _NodeConnection(asyncio.Protocol):
    """One connection to the node."""

    def __init__(self, node: FastLoginNode) -> None:
        self._node = node
        self._buffer = bytearray()
        self._awaits_switch_response = False
        self._logged_in = False
        self._greeting_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._node.transports.add(transport)
        greeting = greeting_packet()
        if self._node.greeting_pause_seconds is None:
            transport.write(greeting)
        else:
            half = len(greeting) // 2
            transport.write(greeting[:half])
            self._greeting_timer = asyncio.get_running_loop().call_later(
                self._node.greeting_pause_seconds, transport.write, greeting[half:]
            )

    def connection_lost(self, error: Exception | None) -> None:
        self._node.transports.discard(self._transport)
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()

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
        if self._logged_in:
            if payload[0] == MySqlCommand.QUIT:
                self._transport.close()
            else:
                self._transport.write(frame(1, OK_PAYLOAD))
        elif (
            not self._awaits_switch_response
            and read_nul_bytes(payload, _USER_OFFSET)[0] == AUTH_SWITCH_USER.encode()
        ):
            self._awaits_switch_response = True
            self._transport.write(frame(sequence + 1, _AUTH_SWITCH_REQUEST))
        else:
            self._logged_in = True
            self._node.login_count += 1
            self._transport.write(frame(sequence + 1, OK_PAYLOAD))


@asynccontextmanager
async def run_fast_login_node(
    greeting_pause_seconds: float | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[FastLoginNode]:
    """Run a node on a free port of `host`. With `greeting_pause_seconds`, it pauses within its greeting."""
    node = FastLoginNode(greeting_pause_seconds)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _NodeConnection(node), host, 0, backlog=4096)
    node.endpoint = f"{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield node
    finally:
        server.close()
        # Those of an Envoy on a machine that was cut off are still open.
        for transport in node.transports:
            transport.abort()
        await wait_until(lambda: not node.transports)

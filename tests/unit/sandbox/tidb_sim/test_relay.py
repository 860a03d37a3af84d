"""A relay between two sockets; the test acts as the client and as MariaDB."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.export_states import restore_client_session
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, ServerGreeting
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    MySqlCommand,
    err,
    frame,
    ok,
    parse_payload,
)
from sandbox.tidb_sim.prepared_statements import PreparedStatement
from sandbox.tidb_sim.relay import Relay
from sandbox.tidb_sim.request_handler import RequestHandler
from sandbox.tidb_sim.session_migration import SessionMigration
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream

INTERRUPTED = err(1317, "Query execution was interrupted", "70100")


class SocketEnd:
    """The test's end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    async def send(self, sequence: int, *payloads: bytes) -> None:
        """Send packets in one segment. Each packet is a separate request or response."""
        data = b"".join(frame(sequence, payload) for payload in payloads)
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    async def packet(self) -> bytes:
        """Return the payload of the next packet."""
        header = await self._exactly(4)
        return await self._exactly(int.from_bytes(header[:3], "little"))

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._end, size - len(data))
            assert part, "the other end has closed"
            data += part
        return data


@asynccontextmanager
async def connection(*, narrow: bool = False) -> AsyncIterator[tuple[PacketStream, SocketEnd]]:
    """Yield a stream and its other end. A `narrow` stream has the smallest possible send buffer."""
    near, far = socket.socketpair()
    if narrow:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    far.setblocking(False)
    _, stream = await asyncio.get_running_loop().connect_accepted_socket(PacketStream, near)
    try:
        yield stream, SocketEnd(far)
    finally:
        far.close()
        await stream.close()


@asynccontextmanager
async def relay() -> AsyncIterator[tuple[SocketEnd, SocketEnd, SessionMigration]]:
    """Yield the client's end and MariaDB's (`narrow`) end of a running relay, and its SessionMigration."""
    async with connection() as (stream, client), connection(narrow=True) as (inner, mariadb):
        node = SimNode("n", "v8.5.3", "8.0.11-TiDB-v8.5.3", {})
        backend = BackendConnection(inner, ServerGreeting("", 1, OFFERED_CAPABILITIES))
        rules = MigrationRules()
        migration = SessionMigration(
            node, SqlClientInfo(), backend, rules, database="", by_token=False, deprecate_eof=False
        )
        requests = RequestHandler(node, SqlClientInfo(), migration, deprecate_eof=False)
        relay_under_test = Relay(node, requests, stream, backend)
        run_task = asyncio.create_task(relay_under_test.run())
        yield client, mariadb, migration
        relay_under_test.abort()
        assert await run_task is None


async def test_flow_control_continues_during_own_queries() -> None:
    """The relay pauses a client because MariaDB is slow, sends its own query, and resumes the client."""
    async with relay() as (client, mariadb, migration):
        statement_id = migration.tracker.prepared_statements.add(PreparedStatement(b"select ?", "", 7, 1))
        data = struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, statement_id, 0) + bytes(100_000)
        # The relay reads both requests before it learns that MariaDB accepts no more data.
        await client.send(0, data, b"\x03show session_states")
        assert len(await mariadb.packet()) == len(data)
        assert (await mariadb.packet()).startswith(b"\x03SELECT HEX(")
        await mariadb.send(1, INTERRUPTED)
        assert await client.packet() == INTERRUPTED
        await client.send(0, b"\x0e")
        assert await mariadb.packet() == b"\x0e"
        await mariadb.send(1, ok(AUTOCOMMIT))
        assert await client.packet() == ok(AUTOCOMMIT)


@pytest.mark.parametrize("response", [ok(AUTOCOMMIT), INTERRUPTED])
async def test_session_ends_if_client_settings_cannot_be_restored(response: bytes) -> None:
    async with connection() as (stream, mariadb):
        backend = BackendConnection(stream, ServerGreeting("", 1, OFFERED_CAPABILITIES))
        restore_task = asyncio.create_task(restore_client_session(backend, "SET character_set_client = gbk"))
        assert await mariadb.packet() == b"\x03SET character_set_client = gbk"
        await mariadb.send(1, response)
        if response != INTERRUPTED:
            await restore_task
            return
        with pytest.raises(ConnectionClosed) as raised:
            await restore_task
        assert isinstance(raised.value.__cause__, BackendError)


def test_joins_payload_of_several_packets_once_complete() -> None:
    first = MAX_PACKET_PAYLOAD.to_bytes(3, "little") + b"\0" + bytes(MAX_PACKET_PAYLOAD)
    data = bytearray(first + frame(1, b"end")[:-1])
    assert parse_payload(data, check_sequence=True) is None
    data += b"d" + b"behind"
    assert parse_payload(data, check_sequence=True) == (bytes(MAX_PACKET_PAYLOAD) + b"end", len(first) + 7)

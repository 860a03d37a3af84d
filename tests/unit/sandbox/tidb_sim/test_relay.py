"""A relay between two sockets, at whose other ends the test is the client and MariaDB."""

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


class End:
    """The test's end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    async def send(self, sequence: int, *payloads: bytes) -> None:
        """Packets in one segment, each of them an answer or a request of its own."""
        data = b"".join(frame(sequence, payload) for payload in payloads)
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    async def packet(self) -> bytes:
        """The payload of the next packet."""
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
async def connection(*, narrow: bool = False) -> AsyncIterator[tuple[PacketStream, End]]:
    """A stream and its other end. `narrow`: hardly anything fits in before that one reads."""
    near, far = socket.socketpair()
    if narrow:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    far.setblocking(False)
    _, stream = await asyncio.get_running_loop().connect_accepted_socket(PacketStream, near)
    try:
        yield stream, End(far)
    finally:
        far.close()
        await stream.close()


@asynccontextmanager
async def relay() -> AsyncIterator[tuple[End, End, SessionMigration]]:
    """A relay that runs: the ends of the client and of MariaDB, which takes little at once; its session."""
    async with connection() as (stream, client), connection(narrow=True) as (inner, mariadb):
        node = SimNode("n", "v8.5.3", "8.0.11-TiDB-v8.5.3", {}, lambda: None, lambda: None)
        backing = BackendConnection(inner, ServerGreeting("", 1, OFFERED_CAPABILITIES))
        rules = MigrationRules()
        movement = SessionMigration(
            node, SqlClientInfo(), backing, rules, database="", by_token=False, deprecate_eof=False
        )
        requests = RequestHandler(node, SqlClientInfo(), movement, deprecate_eof=False)
        running = Relay(node, requests, stream, backing)
        serving = asyncio.create_task(running.run())
        yield client, mariadb, movement
        running.abort()
        assert await serving is None


async def test_flow_control_goes_on_while_mariadb_is_asked() -> None:
    """What MariaDB took too slowly before must not keep the client from being read afterwards."""
    async with relay() as (client, mariadb, movement):
        number = movement.tracker.prepared_statements.add(PreparedStatement(b"select ?", "", 7, 1))
        data = struct.pack("<BIH", MySqlCommand.STMT_SEND_LONG_DATA, number, 0) + bytes(100_000)
        # The relay reads both before it hears that MariaDB takes no more.
        await client.send(0, data, b"\x03show session_states")
        assert len(await mariadb.packet()) == len(data)
        assert (await mariadb.packet()).startswith(b"\x03SELECT HEX(")
        await mariadb.send(1, INTERRUPTED)
        assert await client.packet() == INTERRUPTED
        await client.send(0, b"\x0e")
        assert await mariadb.packet() == b"\x0e"
        await mariadb.send(1, ok(AUTOCOMMIT))
        assert await client.packet() == ok(AUTOCOMMIT)


@pytest.mark.parametrize("times", [0, 1, 2])
async def test_a_session_that_cannot_be_given_back_ends(times: int) -> None:
    """KILL QUERY may hit any statement of ours; one that undoes what we changed is tried once more."""
    async with connection() as (stream, mariadb):
        backing = BackendConnection(stream, ServerGreeting("", 1, OFFERED_CAPABILITIES))
        giving = asyncio.create_task(restore_client_session(backing, "SET character_set_client = gbk"))
        for answer in ([INTERRUPTED] * times + [ok(AUTOCOMMIT)])[:2]:
            assert await mariadb.packet() == b"\x03SET character_set_client = gbk"
            await mariadb.send(1, answer)
        if times < 2:
            await giving
            return
        with pytest.raises(ConnectionClosed) as ended:
            await giving
        assert isinstance(ended.value.__cause__, BackendError)


def test_a_payload_of_several_packets_is_joined_once_all_are_there() -> None:
    first = MAX_PACKET_PAYLOAD.to_bytes(3, "little") + b"\0" + bytes(MAX_PACKET_PAYLOAD)
    data = bytearray(first + frame(1, b"end")[:-1])
    assert parse_payload(data, check_sequence=True) is None
    data += b"d" + b"behind"
    assert parse_payload(data, check_sequence=True) == (bytes(MAX_PACKET_PAYLOAD) + b"end", len(first) + 7)

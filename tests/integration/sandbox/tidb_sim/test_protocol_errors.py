"""A simulated server checks PROXY headers, logins and sequence numbers, and rejects invalid ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import connect_driver, raw_connection, session_rules


async def test_errors_before_login_have_no_sqlstate(mariadb: MariaDb) -> None:
    """The server does not know the client's capabilities yet, so it sends no SQLSTATE."""
    async with TidbSim(SimSettings(session_rules(mariadb, max_connections=1))) as sim:
        async with raw_connection(sim) as old:
            await old.read_packet()
            old.writer.write(frame(1, b"\x85\x24\0\0\0old\0"))
            assert (await old.read_packet())[1][:4] == b"\xff" + struct.pack("<H", 1251) + b"C"
        connection = await connect_driver(sim)
        async with raw_connection(sim) as late:
            assert await late.read_packet() == (0, b"\xff\x10\x04Too many connections")
            assert await late.reader.read() == b""
        await connection.ensure_closed()


async def test_node_that_fills_up_during_login_sends_error_twice(
    mariadb: MariaDb,
) -> None:
    """TiDB 8.5.3 sends "Too many connections" twice, too (observed)."""
    async with (
        TidbSim(SimSettings(session_rules(mariadb, max_connections=1))) as sim,
        raw_connection(sim) as late,
        raw_connection(sim) as first,
    ):
        await late.read_packet()
        assert (await first.login())[0] == 0
        assert await late.send_login() == b"\xff\x10\x04#08004Too many connections"
        assert await late.read_packet() == (3, b"\xff\x10\x04#08004Too many connections")
        assert await late.reader.read() == b""


async def test_required_proxy_header_sets_client_address(mariadb: MariaDb) -> None:
    v2 = (
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"
        + bytes((10, 0, 0, 7, 10, 0, 0, 1))
        + struct.pack(">HH", 40001, 4000)
    )
    v6 = b"\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x24" + bytes(15) + b"\x01" + bytes(16) + struct.pack(">HH", 7, 4000)
    local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0"
    async with TidbSim(SimSettings(session_rules(mariadb, requires_proxy_header=True))) as sim:
        for header, peer in ((v2, "10.0.0.7"), (v6, "::1"), (local, "127.0.0.1")):
            async with raw_connection(sim) as client:
                client.writer.write(header)
                assert await client.login() == ok(2)
                assert await client.rows("select user()") == [(f"root@{peer}",)]
        async with raw_connection(sim) as client:
            assert b"PROXY protocol header is required" in await client.login()
        assert sim.node.violations == []


async def test_unexpected_proxy_header_is_violation(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_connection(sim) as client:
        client.writer.write(b"PROXY TCP4 10.0.0.8 10.0.0.1 40002 4000\r\n")
        await client.read_packet()
        assert (await client.read_packet())[1][:3] == b"\xff\x74\x1f"
        assert len(sim.node.violations) == 1


async def test_server_without_storage_closes_without_error(mariadb: MariaDb, tmp_path: Path) -> None:
    link = tmp_path / "socket"
    link.symlink_to(mariadb.socket)
    async with TidbSim(SimSettings(SessionRules(str(link)))) as sim:
        link.unlink()
        async with raw_connection(sim) as client:
            assert await client.reader.read() == b""


@pytest.mark.parametrize("sequence", [1, 5, 255])
async def test_wrong_sequence_number_is_violation(mariadb: MariaDb, sequence: int) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_connection(sim) as client:
        await client.login()
        client.writer.write(frame(sequence, b"\x03select 1"))
        answer = await client.read_packet()
        assert answer == ((sequence + 1) & 0xFF, b"\xff\x74\x1f#HY000invalid sequence %d != 0" % sequence)
        assert await client.reader.read() == b""
        assert [text.partition(": ")[2] for text in sim.node.violations] == [
            f"invalid sequence {sequence} != 0"
        ]


async def test_wrong_sequence_number_in_login_or_long_request_is_violation(mariadb: MariaDb) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim:
        async with raw_connection(sim) as client:
            await client.read_packet()
            client.writer.write(frame(0, bytes(40)))
            assert (await client.read_packet())[1][:3] == b"\xff\x74\x1f"
        async with raw_connection(sim) as client:
            await client.login()
            # A full payload continues in packet 1, not 2.
            client.writer.write(b"\xff\xff\xff\0\x03" + b" " * 0xFFFFFE + frame(2, b"select 1"))
            assert b"invalid sequence 2 != 1" in (await client.read_packet())[1]
        assert len(sim.node.violations) == 2


@pytest.mark.parametrize("rest", [b"", frame(0, b"\x0e")])
async def test_empty_request_is_violation(mariadb: MariaDb, rest: bytes) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim, raw_connection(sim) as client:
        await client.login()
        client.writer.write(frame(0, b"") + rest)
        assert (await client.read_packet())[1][:3] == b"\xff\x74\x1f"
        assert len(sim.node.violations) == 1

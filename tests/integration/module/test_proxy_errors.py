"""What a client reads that the module refuses: the exact packet, then a FIN; and nothing is left of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until, wait_until_read

connect: Callable[..., Any] = pymysql.connect
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"

# Reason, what the client sends, whether the error has an SQLSTATE, and its number.
REFUSED_BY_PACKET = {
    "HTTP": ("bad_packet", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", False, 0x20 + 1),
    "a wrong number": ("bad_packet", login_packet(sequence=5), False, 6),
    "an empty packet": ("bad_packet", b"\0\0\0\x01", False, 2),
    "a short packet": ("bad_packet", frame(1, b"\0\x02\0\0"), False, 2),
    "TLS where there is none": (
        "bad_packet",
        frame(1, (CAPABILITIES | Capability.SSL).to_bytes(4, "little") + bytes(28)),
        False,
        2,
    ),
    "TLS unasked": ("bad_packet", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(506), False, 3),
    "zlib unoffered": ("compression_not_offered", login_packet(CAPABILITIES | Capability.COMPRESS), True, 2),
    "zstd unoffered": ("compression_not_offered", login_packet(CAPABILITIES | Capability(1 << 26)), True, 2),
    "a client before 4.1": ("too_old", frame(1, b"\x05\x20\0\0\x01root\0\0"), False, 2),
}


def documented(reason: str) -> tuple[int, bytes, bytes]:
    """Code, SQLSTATE and text of a refusal, as `docs/reference/errors.md` promises them."""
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) > 3 and cells[2] == f"`{reason}`":
            return int(cells[0].removeprefix("| ")), cells[1].encode(), cells[3].encode()
    raise AssertionError(f"docs/reference/errors.md has no {reason}")


def refusal(reason: str, sequence: int, *, state: bool = False) -> bytes:
    """The whole packet."""
    code, sqlstate, text = documented(reason)
    payload = b"\xff" + code.to_bytes(2, "little") + (b"#" + sqlstate if state else b"") + text
    return frame(sequence, payload)


@asynccontextmanager
async def proxied(
    directory: Path, parts: ModuleConfig | None = None, *, workers: int = 1
) -> AsyncIterator[ModuleEnvoy]:
    """An Envoy before one node that lets everybody in; at the end it has no session left."""
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(directory, [node.endpoint], parts, workers=workers) as proxy,
    ):
        yield proxy
        for client in proxy.clients:
            client.writer.close()
        states = ("login", "idle", "busy", "transaction", "opaque")
        await proxy.wait_for_metrics({("sessions", node.endpoint, state): 0 for state in states})
        gone = (await proxy.stats("downstream_cx_active|upstream_cx_active|tcp.sql")).items()
        assert {
            name: value for name, value in gone if name.endswith("cx_active") and "admin" not in name
        } == {
            "cluster.tidb.upstream_cx_active": 0,
            **{
                name: 0
                for name, _ in gone
                if name.startswith("listener.127.0.0.1") and name.endswith("cx_active")
            },
        }


async def greeted(proxy: ModuleEnvoy) -> RawClient:
    client = await proxy.connect()
    assert (await with_timeout(client.read_packet()))[1][:1] == b"\x0a"
    return client


async def failures(proxy: ModuleEnvoy, reason: str, count: int) -> None:
    """Wait until `count` logins have failed for the reason, and see that none has for another."""

    async def told() -> dict[str, int]:
        found: dict[str, int] = {}
        for (name, labels), value in (await proxy.metrics()).items():
            if name == "login_failures":
                found[labels[1]] = found.get(labels[1], 0) + value
        return found

    async def are_told() -> bool:
        return (await told()).get(reason, 0) >= count

    await wait_until(are_told)
    assert await told() == {reason: count}


@pytest.mark.parametrize(
    ("reason", "sent", "state", "sequence"), REFUSED_BY_PACKET.values(), ids=REFUSED_BY_PACKET.keys()
)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
async def test_a_bad_login_is_refused(
    tmp_path: Path, reason: str, sent: bytes, state: bool, sequence: int, bytewise: bool
) -> None:
    async with proxied(tmp_path) as proxy:
        client = await greeted(proxy)
        refused = asyncio.create_task(read_to_end(client))
        step = 1 if bytewise else len(sent)
        for at in range(0, len(sent), step):
            client.writer.write(sent[at : at + step])
            if not refused.done():  # what it still sends is thrown away, but not for long
                await wait_until_read(client.writer)
        told = await refused
        assert told == refusal(reason, sequence, state=state)
        await failures(proxy, reason, 1)


async def test_nothing_may_follow_a_login_before_its_answer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as proxy:
        client = await greeted(proxy)
        client.writer.write(login_packet() + frame(2, b"x"))
        assert await read_to_end(client) == refusal("bad_packet", 2, state=True)


@pytest.mark.parametrize("size", [1 << 20, 8 << 20], ids=["1 MiB", "8 MiB"])
async def test_a_client_that_is_busy_sending_too_much_reads_why(tmp_path: Path, size: int) -> None:
    async with proxied(tmp_path) as proxy:
        for _ in range(3):
            client = await greeted(proxy)
            size = min(size + 1, (1 << 24) - 2)
            client.writer.write(size.to_bytes(3, "little") + b"\x01" + bytes(size))
            assert await read_to_end(client) == refusal("packet_too_large", 2)
        await failures(proxy, "packet_too_large", 3)


async def test_a_refused_client_that_never_stops_is_cut(tmp_path: Path) -> None:
    async with proxied(tmp_path) as proxy:
        client = await greeted(proxy)

        async def is_cut() -> bool:
            client.writer.write(bytes(65_536))
            await client.writer.drain()
            return False

        with pytest.raises(ConnectionError):
            await wait_until(is_cut)


async def test_plain_logins_are_refused_where_tls_is_required(tmp_path: Path) -> None:
    pair = PemFiles.create(tmp_path / "certificates")
    client_side = {"tls": "required", "cert": str(pair.cert), "key": str(pair.key)}
    async with proxied(tmp_path, ModuleConfig(client=client_side)) as proxy:
        client = await greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == refusal("tls_required", 2, state=True)
        with pytest.raises(pymysql.OperationalError) as told:
            await asyncio.to_thread(
                connect, host="127.0.0.1", port=proxy.port, user="root", ssl_disabled=True
            )
        assert told.value.args == (3159, documented("tls_required")[2].decode())
        await failures(proxy, "tls_required", 2)


@pytest.mark.parametrize("sent", [b"", b"\x20", login_packet()[:-1]], ids=["nothing", "a byte", "almost all"])
async def test_a_login_must_not_take_long(tmp_path: Path, sent: bytes) -> None:
    async with proxied(tmp_path, ModuleConfig(live={"login_timeout": 0.5})) as proxy:
        client = await greeted(proxy)
        client.writer.write(sent)
        assert await read_to_end(client) == refusal("login_too_slow", 2 if sent else 1)
        await failures(proxy, "login_too_slow", 1)


async def test_a_login_in_time_is_not_ended_later(tmp_path: Path) -> None:
    async with proxied(tmp_path, ModuleConfig(live={"login_timeout": 0.5})) as proxy:
        client = await connect_logged_in(proxy)
        slow = await greeted(proxy)
        await read_to_end(slow)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_a_silent_node_makes_the_login_too_slow_as_well(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())

    async with run_fake_server(silent) as node:
        parts = ModuleConfig(live={"login_timeout": 0.5})
        async with run_envoy(tmp_path, [node.endpoint], parts) as proxy:
            client = await greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == refusal("login_too_slow", 2, state=True)


async def test_clients_are_limited_over_all_workers(tmp_path: Path) -> None:
    async with proxied(tmp_path, ModuleConfig(session={"max_connections": 10}), workers=2) as proxy:
        served = [await connect_logged_in(proxy) for _ in range(10)]
        for _ in range(20):
            client = await proxy.connect()
            assert await read_to_end(client) == refusal("too_many_connections", 0)
        served.pop().writer.close()

        async def is_served() -> bool:
            client = await proxy.connect()
            if (await with_timeout(client.read_packet()))[1][0] != 10:
                return False
            client.writer.write(login_packet())
            return (await with_timeout(client.read_packet()))[1][0] == 0

        # The slot is free when Envoy has seen the FIN.
        await wait_until(is_served)
        assert await read_to_end(await proxy.connect()) == refusal("too_many_connections", 0)


async def test_refused_clients_take_no_slots(tmp_path: Path) -> None:
    async with proxied(tmp_path, ModuleConfig(session={"max_connections": 1}), workers=2) as proxy:
        first = await connect_logged_in(proxy)
        refused = await asyncio.gather(*(proxy.connect() for _ in range(50)))
        assert {await read_to_end(client) for client in refused} == {refusal("too_many_connections", 0)}
        assert (await with_timeout(first.send_command(0x0E)))[0] == 0
        await failures(proxy, "too_many_connections", 50)


async def test_a_clear_text_password_does_not_reach_a_node_without_tls(tmp_path: Path) -> None:
    pair = PemFiles.create(tmp_path / "certificates")
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def wants_password(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        header = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(header[:3], "little"))
        writer.write(frame(header[3] + 1, b"\xfemysql_clear_password\0"))
        seen.put_nowait(await reader.read())

    client_side = {"tls": "optional", "cert": str(pair.cert), "key": str(pair.key)}
    async with (
        run_fake_server(wants_password) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=client_side)) as proxy,
    ):
        with pytest.raises(pymysql.OperationalError) as told:
            await asyncio.to_thread(
                connect,
                host="127.0.0.1",
                port=proxy.port,
                user="root",
                password="secret",
                ssl={"ca": str(pair.ca)},
            )
        assert told.value.args == (1105, documented("clear_text_password")[2].decode())
        assert await with_timeout(seen.get()) == b""
        await failures(proxy, "clear_text_password", 1)


async def test_a_node_without_tls_is_refused_where_it_is_required(tmp_path: Path) -> None:
    async with run_fake_server(serve_ok) as node:
        parts = ModuleConfig(node={"tls": "required", "verify": "none"})
        async with run_envoy(tmp_path, [node.endpoint], parts) as proxy:
            client = await proxy.connect()
            assert await read_to_end(client) == refusal("node_without_tls", 0)
            await failures(proxy, "node_without_tls", 1)


async def test_a_node_whose_tls_fails_is_told_of(tmp_path: Path) -> None:
    async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        await reader.readexactly(36)
        writer.write(b"this is no TLS record")

    async with run_fake_server(no_tls) as node:
        parts = ModuleConfig(node={"tls": "preferred", "verify": "none"})
        async with run_envoy(tmp_path, [node.endpoint], parts) as proxy:
            client = await greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == refusal("node_tls_failed", 2, state=True)
            await failures(proxy, "node_tls_failed", 1)
            await proxy.wait_for_metrics({("connect_failures", node.endpoint, "tls"): 1})
            assert re.search(r"TLS with 127\.0\.0\.1:\d+ failed: .*what came is not TLS", proxy.log)


@pytest.mark.parametrize("half_way", [False, True], ids=["before it", "in the middle"])
async def test_a_client_that_goes_away_during_its_login_is_not_the_nodes_fault(
    tmp_path: Path, half_way: bool
) -> None:
    async with proxied(tmp_path) as proxy:
        client = await greeted(proxy) if half_way else await proxy.connect()
        if half_way:
            client.writer.write(login_packet()[:20])
        client.writer.close()
        await failures(proxy, "client_gone", 1)


async def test_a_node_that_goes_away_during_a_login_is_not_the_clients_fault(tmp_path: Path) -> None:
    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await reader.readexactly(4)
        writer.close()

    async with run_fake_server(leaves) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == refusal("node_gone", 2, state=True)
        await failures(proxy, "node_gone", 1)


@pytest.mark.parametrize("closes", [True, False], ids=["and closes", "and stays"])
async def test_a_denied_client_is_told_and_let_go(tmp_path: Path, closes: bool) -> None:
    denial = b"\xff\x15\x04#28000Access denied for user 'root'"

    async def denies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        header = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(header[:3], "little"))
        writer.write(frame(header[3] + 1, denial))
        if closes:
            writer.close()

    async with run_fake_server(denies) as node:
        parts = ModuleConfig(live={"login_timeout": 2})
        async with run_envoy(tmp_path, [node.endpoint], parts) as proxy:
            client = await greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == frame(2, denial)
            await failures(proxy, "denied", 1)
            await proxy.wait_for_metrics({("sessions", node.endpoint, "login"): 0})


async def test_a_node_that_breaks_off_into_nonsense_is_told_of(tmp_path: Path) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = RawClient(reader, writer)
        writer.write(greeting_packet())
        await node.read_packet()
        writer.write(frame(9, b"\0\0\0\x02\0\0\0"))

    async with run_fake_server(nonsense) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == refusal("node_protocol", 2, state=True)
        await failures(proxy, "node_protocol", 1)


async def test_what_is_sent_ahead_of_the_greeting_is_refused_behind_it(tmp_path: Path) -> None:
    """A client that sends first: its bytes wait until a node has greeted, and so does the answer."""
    go = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await accept_login(reader, writer)

    async with run_fake_server(waits) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        client.writer.write(b"\xff" * 100)
        await client.writer.drain()
        go.set()
        assert (await with_timeout(client.read_packet()))[1][0] == 10
        assert (await read_to_end(client))[4:7] == b"\xff\x13\x04"

"""Clients that the module rejects receive the documented error packet and then a FIN. Nothing leaks."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql
import pytest
import pytest_asyncio

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

# Reason of the error, bytes from the client, whether the error has an SQLSTATE, sequence number of the error.
REJECTED_PACKETS = {
    "HTTP": ("bad_packet", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", False, 0x20 + 1),
    "a wrong sequence number": ("bad_packet", login_packet(sequence=5), False, 6),
    "an empty packet": ("bad_packet", b"\0\0\0\x01", False, 2),
    "a short packet": ("bad_packet", frame(1, b"\0\x02\0\0"), False, 2),
    "an SSLRequest without an offer": (
        "bad_packet",
        frame(1, (CAPABILITIES | Capability.SSL).to_bytes(4, "little") + bytes(28)),
        False,
        2,
    ),
    "a ClientHello without an SSLRequest": (
        "bad_packet",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(506),
        False,
        3,
    ),
    "zlib without an offer": (
        "compression_not_offered",
        login_packet(CAPABILITIES | Capability.COMPRESS),
        True,
        2,
    ),
    "zstd without an offer": (
        "compression_not_offered",
        login_packet(CAPABILITIES | Capability(1 << 26)),
        True,
        2,
    ),
    "a client before 4.1": ("too_old", frame(1, b"\x05\x20\0\0\x01root\0\0"), False, 2),
}


def documented_error(reason: str) -> tuple[int, bytes, bytes]:
    """Return code, SQLSTATE and text of an error, as docs/reference/errors.md documents them."""
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) > 3 and cells[2] == f"`{reason}`":
            return int(cells[0].removeprefix("| ")), cells[1].encode(), cells[3].encode()
    raise AssertionError(f"docs/reference/errors.md has no {reason}")


def expected_error(reason: str, sequence: int, *, state: bool = False) -> bytes:
    """Return the complete error packet."""
    code, sqlstate, text = documented_error(reason)
    payload = b"\xff" + code.to_bytes(2, "little") + (b"#" + sqlstate if state else b"") + text
    return frame(sequence, payload)


@asynccontextmanager
async def run_proxy(
    directory: Path, config: ModuleConfig | None = None, *, workers: int = 1
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy in front of a node that accepts every login. At the end, check that no session remains."""
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(directory, [node.endpoint], config, workers=workers) as proxy,
    ):
        yield proxy
        for client in proxy.clients:
            client.writer.close()
        await proxy.wait_no_sessions(node.endpoint)

        async def has_no_connection() -> bool:
            # A session has left its node before Envoy has closed all of its connections.
            stats = (await proxy.stats("downstream_cx_active|upstream_cx_active")).items()
            counts = {name: value for name, value in stats if "admin" not in name}
            assert "cluster.tidb.upstream_cx_active" in counts
            return not any(counts.values())

        await wait_until(has_no_connection)


async def connect_greeted(proxy: ModuleEnvoy) -> RawClient:
    client = await proxy.connect()
    assert (await with_timeout(client.read_packet()))[1][:1] == b"\x0a"
    return client


async def wait_login_failures(proxy: ModuleEnvoy, reason: str, count: int) -> None:
    """Wait until `count` logins have failed for this reason. Check that none failed for another reason."""
    await wait_all_login_failures(proxy, Counter({reason: count}))


async def wait_all_login_failures(proxy: ModuleEnvoy, expected: Counter[str]) -> None:
    """Wait until as many logins as expected have failed. Check that each failed for the expected reason."""

    async def failures_by_reason() -> Counter[str]:
        counts: Counter[str] = Counter()
        for (name, labels), value in (await proxy.metrics()).items():
            if name == "login_failures":
                counts[labels[1]] += value
        return counts

    async def are_reported() -> bool:
        return (await failures_by_reason()).total() >= expected.total()

    await wait_until(are_reported)
    assert await failures_by_reason() == expected


@dataclass
class SharedProxy:
    """An Envoy that tests share, as it starts slowly. `rejected` counts logins that must fail, by reason."""

    proxy: ModuleEnvoy
    rejected: Counter[str] = field(default_factory=Counter)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedProxy]:
    """Check all login failures once, at the end: a check per test would wait up to 1 s for Envoy's report."""
    async with run_proxy(tmp_path_factory.mktemp("shared")) as proxy:
        shared_proxy = SharedProxy(proxy)
        yield shared_proxy
        await wait_all_login_failures(proxy, shared_proxy.rejected)


@pytest.mark.parametrize(
    ("reason", "sent", "state", "sequence"), REJECTED_PACKETS.values(), ids=REJECTED_PACKETS.keys()
)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.asyncio(loop_scope="module")
async def test_malformed_login_is_rejected(
    shared_proxy: SharedProxy, reason: str, sent: bytes, state: bool, sequence: int, bytewise: bool
) -> None:
    client = await connect_greeted(shared_proxy.proxy)
    shared_proxy.rejected[reason] += 1
    reading = asyncio.create_task(read_to_end(client))
    step = 1 if bytewise else len(sent)
    for offset in range(0, len(sent), step):
        client.writer.write(sent[offset : offset + step])
        if not reading.done():  # Envoy reads on for a short time after its error
            await wait_until_read(client.writer)
    assert await reading == expected_error(reason, sequence, state=state)


async def test_packet_after_the_login_is_rejected(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        client = await connect_greeted(proxy)
        client.writer.write(login_packet() + frame(2, b"x"))
        assert await read_to_end(client) == expected_error("bad_packet", 2, state=True)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 8 << 20], ids=["1 MiB and a byte", "8 MiB"])
async def test_client_that_sends_an_oversized_packet_receives_the_error(tmp_path: Path, size: int) -> None:
    async with run_proxy(tmp_path) as proxy:
        for _ in range(3):
            client = await connect_greeted(proxy)
            client.writer.write(size.to_bytes(3, "little") + b"\x01" + bytes(size))
            assert await read_to_end(client) == expected_error("packet_too_large", 2)
        await wait_login_failures(proxy, "packet_too_large", 3)


async def test_rejected_client_that_keeps_sending_is_disconnected(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        client = await connect_greeted(proxy)

        async def is_cut() -> bool:
            client.writer.write(bytes(65_536))
            await client.writer.drain()
            return False

        with pytest.raises(ConnectionError):
            await wait_until(is_cut)


async def test_plain_login_is_rejected_if_tls_is_required(tmp_path: Path) -> None:
    certificates = PemFiles.create(tmp_path / "certificates")
    tls = {"tls": "required", "cert": str(certificates.cert), "key": str(certificates.key)}
    async with run_proxy(tmp_path, ModuleConfig(client=tls)) as proxy:
        client = await connect_greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == expected_error("tls_required", 2, state=True)
        with pytest.raises(pymysql.OperationalError) as error:
            await asyncio.to_thread(
                connect, host="127.0.0.1", port=proxy.port, user="root", ssl_disabled=True
            )
        assert error.value.args == (3159, documented_error("tls_required")[2].decode())
        await wait_login_failures(proxy, "tls_required", 2)


@pytest.mark.parametrize("sent", [b"", b"\x20", login_packet()[:-1]], ids=["nothing", "a byte", "almost all"])
async def test_slow_login_is_rejected(tmp_path: Path, sent: bytes) -> None:
    async with run_proxy(tmp_path, ModuleConfig(live_settings={"login_timeout": 0.5})) as proxy:
        client = await connect_greeted(proxy)
        client.writer.write(sent)
        assert await read_to_end(client) == expected_error("login_too_slow", 2 if sent else 1)
        await wait_login_failures(proxy, "login_too_slow", 1)


async def test_login_timeout_does_not_end_a_session(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, ModuleConfig(live_settings={"login_timeout": 0.5})) as proxy:
        client = await connect_logged_in(proxy)
        slow = await connect_greeted(proxy)
        await read_to_end(slow)
        assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def test_silent_node_makes_the_login_too_slow(tmp_path: Path) -> None:
    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())

    async with run_fake_server(greet_only) as node:
        config = ModuleConfig(live_settings={"login_timeout": 0.5})
        async with run_envoy(tmp_path, [node.endpoint], config) as proxy:
            client = await connect_greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == expected_error("login_too_slow", 2, state=True)


async def test_connection_limit_applies_across_workers(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, ModuleConfig(session={"max_connections": 10}), workers=2) as proxy:
        clients = [await connect_logged_in(proxy) for _ in range(10)]
        for _ in range(20):
            client = await proxy.connect()
            assert await read_to_end(client) == expected_error("too_many_connections", 0)
        clients.pop().writer.close()

        async def is_served() -> bool:
            client = await proxy.connect()
            if (await with_timeout(client.read_packet()))[1][0] != 10:
                return False
            client.writer.write(login_packet())
            return (await with_timeout(client.read_packet()))[1][0] == 0

        # The closed client counts until Envoy reads its FIN.
        await wait_until(is_served)
        assert await read_to_end(await proxy.connect()) == expected_error("too_many_connections", 0)


async def test_rejected_clients_use_no_slots(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, ModuleConfig(session={"max_connections": 1}), workers=2) as proxy:
        first = await connect_logged_in(proxy)
        rejected = await asyncio.gather(*(proxy.connect() for _ in range(50)))
        assert {await read_to_end(client) for client in rejected} == {
            expected_error("too_many_connections", 0)
        }
        assert (await with_timeout(first.send_command(0x0E)))[0] == 0
        await wait_login_failures(proxy, "too_many_connections", 50)


async def test_clear_text_password_does_not_reach_a_plain_node(tmp_path: Path) -> None:
    certificates = PemFiles.create(tmp_path / "certificates")
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def request_clear_text_password(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        header = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(header[:3], "little"))
        writer.write(frame(header[3] + 1, b"\xfemysql_clear_password\0"))
        received.put_nowait(await reader.read())

    tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    async with (
        run_fake_server(request_clear_text_password) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=tls)) as proxy,
    ):
        with pytest.raises(pymysql.OperationalError) as error:
            await asyncio.to_thread(
                connect,
                host="127.0.0.1",
                port=proxy.port,
                user="root",
                password="secret",
                ssl={"ca": str(certificates.ca)},
            )
        assert error.value.args == (1105, documented_error("clear_text_password")[2].decode())
        assert await with_timeout(received.get()) == b""
        await wait_login_failures(proxy, "clear_text_password", 1)


async def test_node_without_tls_is_rejected_if_tls_is_required(tmp_path: Path) -> None:
    async with run_fake_server(serve_ok) as node:
        config = ModuleConfig(node={"tls": "required", "verify": "none"})
        async with run_envoy(tmp_path, [node.endpoint], config) as proxy:
            client = await proxy.connect()
            assert await read_to_end(client) == expected_error("node_without_tls", 0)
            await wait_login_failures(proxy, "node_without_tls", 1)


async def test_node_tls_failure_is_reported(tmp_path: Path) -> None:
    async def fail_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        await reader.readexactly(36)
        writer.write(b"this is no TLS record")

    async with run_fake_server(fail_tls) as node:
        config = ModuleConfig(node={"tls": "preferred", "verify": "none"})
        async with run_envoy(tmp_path, [node.endpoint], config) as proxy:
            client = await connect_greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == expected_error("node_tls_failed", 2, state=True)
            await wait_login_failures(proxy, "node_tls_failed", 1)
            await proxy.wait_for_metrics({("connect_failures", node.endpoint, "tls"): 1})
            assert re.search(r"TLS with 127\.0\.0\.1:\d+ failed: .*the received bytes are not TLS", proxy.log)


@pytest.mark.parametrize("in_login", [False, True], ids=["before it", "in the middle"])
async def test_client_that_disconnects_during_login_is_counted(tmp_path: Path, in_login: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        client = await connect_greeted(proxy) if in_login else await proxy.connect()
        if in_login:
            client.writer.write(login_packet()[:20])
        client.writer.close()
        await wait_login_failures(proxy, "client_gone", 1)


async def test_node_that_disconnects_during_login_is_counted(tmp_path: Path) -> None:
    async def close_during_login(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        await reader.readexactly(4)
        writer.close()

    async with run_fake_server(close_during_login) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == expected_error("node_gone", 2, state=True)
        await wait_login_failures(proxy, "node_gone", 1)
        await proxy.wait_for_metrics({("login_failures", node.endpoint, "node_gone"): 1})


@pytest.mark.parametrize("node_closes", [True, False], ids=["and closes", "and stays"])
async def test_denied_client_receives_the_nodes_error(tmp_path: Path, node_closes: bool) -> None:
    denial = b"\xff\x15\x04#28000Access denied for user 'root'"

    async def deny_login(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet())
        header = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(header[:3], "little"))
        writer.write(frame(header[3] + 1, denial))
        if node_closes:
            writer.close()

    async with run_fake_server(deny_login) as node:
        config = ModuleConfig(live_settings={"login_timeout": 1})
        async with run_envoy(tmp_path, [node.endpoint], config) as proxy:
            client = await connect_greeted(proxy)
            client.writer.write(login_packet())
            assert await read_to_end(client) == frame(2, denial)
            await wait_login_failures(proxy, "denied", 1)
            await proxy.wait_for_metrics({("sessions", node.endpoint, "login"): 0})


async def test_node_that_sends_an_invalid_packet_is_reported(tmp_path: Path) -> None:
    async def send_invalid_packet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = RawClient(reader, writer)
        writer.write(greeting_packet())
        await node.read_packet()
        writer.write(frame(9, b"\0\0\0\x02\0\0\0"))

    async with run_fake_server(send_invalid_packet) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await connect_greeted(proxy)
        client.writer.write(login_packet())
        assert await read_to_end(client) == expected_error("node_protocol", 2, state=True)
        await wait_login_failures(proxy, "node_protocol", 1)


async def test_bytes_sent_before_the_greeting_are_rejected_after_it(tmp_path: Path) -> None:
    """Envoy first sends the greeting, and only then reads and rejects bytes that the client sent earlier."""
    may_greet = asyncio.Event()

    async def greet_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_greet.wait()
        await accept_login(reader, writer)

    async with run_fake_server(greet_late) as node, run_envoy(tmp_path, [node.endpoint]) as proxy:
        client = await proxy.connect()
        client.writer.write(b"\xff" * 100)
        await client.writer.drain()
        may_greet.set()
        assert (await with_timeout(client.read_packet()))[1][0] == 10
        assert (await read_to_end(client))[4:7] == b"\xff\x13\x04"

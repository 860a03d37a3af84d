"""No password goes on in clear text where it must not: links that must have TLS, and changes of user."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, parse_greeting
from sandbox.tidb_sim.packets import Capability, err, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    client_tls_config,
    connect_with_tls,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient

USER = "who_must_not_be_seen"
PASSWORD = b"hunter2\0"
CHANGE_USER = b"\x11root\0\0\0-\0caching_sha2_password\0"
FULL_AUTHENTICATION = b"\x01\x04"
SHUTDOWN = err(1053, "Server shutdown in progress", "08S01")
ZSTD = Capability(1 << 26)
COMPRESSED = Capability.COMPRESS | ZSTD


def switch(plugin: bytes) -> bytes:
    """AuthSwitchRequest, with a salt."""
    return b"\xfe" + plugin + b"\0" + b"a" * 20 + b"\0"


ASKS = {
    "caching_sha2_password": FULL_AUTHENTICATION,
    "mysql_clear_password": switch(b"mysql_clear_password"),
    "mysql_clear_password, no NUL": b"\xfemysql_clear_password",  # MySQL's client ends it there
    "sha256_password": switch(b"sha256_password"),
    "tidb_session_token": switch(b"tidb_session_token"),
    "dialog": switch(b"dialog"),
    "OpenID": switch(b"authentication_openid_connect_client"),
}


@dataclass
class Node:
    """A node without TLS that lets everybody in, and asks for the password where the user is to be changed.

    Other commands succeed, but for COM_STMT_SEND_LONG_DATA. It hears until the end, or the password.
    """

    asks: bytes = FULL_AUTHENTICATION
    shuts_down: bool = False
    offered: Capability = OFFERED_CAPABILITIES
    login: bytes = b""
    heard: bytes = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = RawClient(reader, writer)
        writer.write(greeting_packet(offered=self.offered))
        sequence, self.login = await node.read_packet()
        writer.write(frame(sequence + 1, OK_PAYLOAD))
        if self.shuts_down:
            writer.write(frame(0, SHUTDOWN))
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                _, payload = await node.read_packet()
                self.heard += payload
                if payload == CHANGE_USER:
                    writer.write(frame(1, self.asks))
                elif payload[:1] == b"\x18":
                    writer.write(frame(1, err(1105, "no such statement", "HY000")))
                elif PASSWORD in payload:
                    writer.close()
                    return
                else:
                    writer.write(frame(1, OK_PAYLOAD))
        self.heard += await reader.read()
        writer.close()


@pytest.fixture
def pair(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


@asynccontextmanager
async def before(directory: Path, node: Node, parts: ModuleConfig) -> AsyncIterator[ModuleEnvoy]:
    """An Envoy before that node. At the end its connections are over, so that it has heard all."""
    async with run_fake_server(node.serve) as peer, run_envoy(directory, [peer.endpoint], parts) as proxy:
        yield proxy
        for client in proxy.clients:
            client.writer.transport.abort()
        for _ in range(peer.connections):
            await with_timeout(peer.connection_ends.get())


async def changes_user(client: RawClient) -> bytes:
    """Ask for another user, answer what comes with the password, and read until the end."""
    try:
        client.writer.write(frame(0, CHANGE_USER))
        sequence, told = await with_timeout(client.read_packet())
        if told[0] == 0xFF:
            # Nothing makes a client stop here, but itself.
            client.writer.write(frame(sequence + 1, PASSWORD))
            assert await read_to_end(client) == b""
            return told
        client.writer.write(frame(sequence + 1, PASSWORD))
        return told + await read_to_end(client)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.parametrize("name", ["node.1:4000", "tidb-.example:4000", "-a.b:4000"])
async def test_a_node_whose_name_no_certificate_can_bear_hears_no_login(
    tmp_path: Path, name: str, verify: str
) -> None:
    heard = bytearray()

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        while data := await reader.read(65_536):
            heard.extend(data)

    parts = ModuleConfig(node={"tls": "required", "verify": verify}, live={"login_timeout": 5})
    async with (
        run_fake_server(listens) as peer,
        run_envoy(tmp_path, [Host(peer.endpoint, name)], parts) as proxy,
    ):
        client = await proxy.connect()
        greeting = asyncio.create_task(client.read_packet())
        with contextlib.suppress(asyncio.IncompleteReadError):  # such a node may be refused before it greets
            if (await with_timeout(greeting))[1][:1] == b"\x0a":
                client.writer.write(login_packet(user=USER))
        told = await read_to_end(client)
        # Where names do not matter, TLS may be tried all the same, and nobody answers it here.
        codes = (b"", b"\xff\x51\x04") if verify == "full" else (b"", b"\xff\x51\x04", b"\xff\x87\x04")
        assert told[4:7] in codes
        for _ in range(peer.connections):
            await with_timeout(peer.connection_ends.get())
        assert USER.encode() not in heard
        # Not one byte of it: at most the request for TLS, and what TLS itself says.
        assert bytes(heard[:4]) in (b"", b"\x20\0\0\x01")
        assert bytes(heard[36:39]) in (b"", b"\x16\x03\x01")


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS.keys())
async def test_a_change_of_user_does_not_expose_a_password(
    tmp_path: Path, pair: PemFiles, asks: bytes
) -> None:
    node = Node(asks)
    async with before(tmp_path, node, client_tls_config(pair)) as proxy:
        told = await changes_user(await connect_with_tls(proxy, pair))
    assert CHANGE_USER in node.heard
    assert PASSWORD not in node.heard
    assert told.startswith(b"\xff\x51\x04#HY000Tidevoy: the password would go to TiDB in clear text")


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS.keys())
async def test_a_change_of_user_may_be_allowed_to(tmp_path: Path, pair: PemFiles, asks: bytes) -> None:
    node = Node(asks)
    async with before(tmp_path, node, client_tls_config(pair, allow_cleartext_backend=True)) as proxy:
        assert await changes_user(await connect_with_tls(proxy, pair)) == asks
    assert node.heard.endswith(PASSWORD)


@pytest.mark.parametrize("plugin", [b"mysql_native_password", b"client_ed25519"])
async def test_a_change_of_user_that_exposes_nothing_goes_on(
    tmp_path: Path, pair: PemFiles, plugin: bytes
) -> None:
    node = Node(switch(plugin))
    async with before(tmp_path, node, client_tls_config(pair)) as proxy:
        client = await connect_with_tls(proxy, pair)
        assert await with_timeout(client.send_command(CHANGE_USER[0], CHANGE_USER[1:])) == switch(plugin)
        client.writer.write(frame(2, b"a hash"))
        assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD
    assert node.heard == CHANGE_USER + b"a hash"


async def nothing_more(client: RawClient) -> None:
    """Already the node's ERR, which nothing asked for, makes a session unfollowable."""
    assert (await with_timeout(client.read_packet()))[1] == SHUTDOWN


async def much_ahead(client: RawClient) -> None:
    """More kinds of commands than anybody keeps in mind."""
    client.writer.write(b"".join(frame(0, kind) for kind in (b"\x0e", b"\x03do 1") * 10))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        for _ in range(20):
            await with_timeout(client.read_packet())


async def long_data(client: RawClient) -> None:
    """A command without an answer, which TiDB answers with ERR when it fails."""
    client.writer.write(frame(0, b"\x18\x01\0\0\0\0\0data"))
    assert (await with_timeout(client.read_packet()))[1][:1] == b"\xff"


Becomes = Callable[[RawClient], Awaitable[None]]
OPAQUE: dict[str, Becomes] = {
    "an ERR unasked": nothing_more,
    "much sent ahead": much_ahead,
    "an ERR to long data": long_data,
}


@pytest.mark.parametrize("allowed", [False, True], ids=["forbidden", "allowed"])
@pytest.mark.parametrize("becomes_opaque", OPAQUE.values(), ids=OPAQUE.keys())
async def test_a_session_that_nobody_follows_changes_no_user_unseen(
    tmp_path: Path, pair: PemFiles, becomes_opaque: Becomes, allowed: bool
) -> None:
    node = Node(shuts_down=becomes_opaque is nothing_more)
    async with before(tmp_path, node, client_tls_config(pair, allow_cleartext_backend=allowed)) as proxy:
        client = await connect_with_tls(proxy, pair)
        # What the node said last reaches the client in any case.
        await becomes_opaque(client)
        told = await changes_user(client)
    assert (PASSWORD in node.heard) == allowed
    if allowed:
        assert told == FULL_AUTHENTICATION
    else:
        assert told[:1] in (b"", b"\xff")


@pytest.mark.parametrize(
    ("client", "node_tls", "allowed", "passed"),
    [
        ("required", False, False, False),
        ("optional", False, False, False),
        ("required", False, True, True),
        ("required", True, False, True),
        ("disabled", False, False, True),
    ],
)
async def test_compression_is_offered_only_where_it_hides_no_password(
    tmp_path: Path, pair: PemFiles, client: str, node_tls: bool, allowed: bool, passed: bool
) -> None:
    node = Node(offered=OFFERED_CAPABILITIES | COMPRESSED | (Capability.SSL if node_tls else Capability(0)))
    parts = client_tls_config(pair, client, allow_cleartext_backend=allowed, passthrough_compression=True)
    more = {"tls": "required" if node_tls else "disabled", "ca": str(pair.ca)}
    parts = ModuleConfig(client=parts.client, node={**parts.node, **more})
    async with before(tmp_path, node, parts) as proxy:
        _, greeting = await with_timeout((await proxy.connect()).read_packet())
        offered = parse_greeting(greeting).capabilities & COMPRESSED
    assert offered == (COMPRESSED if passed else Capability(0))


async def test_a_client_that_compresses_unoffered_is_refused(tmp_path: Path, pair: PemFiles) -> None:
    node = Node(offered=OFFERED_CAPABILITIES | COMPRESSED)
    async with before(tmp_path, node, client_tls_config(pair, passthrough_compression=True)) as proxy:
        refused = b"\xff\xd3\x04#42000Tidevoy: "
        client = await connect_with_tls(proxy, pair, CAPABILITIES | COMPRESSED, answer=refused)
        assert await read_to_end(client) == b""
    assert not node.login

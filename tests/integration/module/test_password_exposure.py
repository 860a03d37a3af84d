"""At login and COM_CHANGE_USER, Envoy forwards a password in clear text only if the TLS settings allow it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
    connect_logged_in,
    connect_with_tls,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.module.tls_node import TlsNode, server_context
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient

USER = "who_must_not_be_seen"
PASSWORD = b"hunter2\0"
CHANGE_USER = b"\x11root\0\0\0-\0caching_sha2_password\0"
FULL_AUTHENTICATION = b"\x01\x04"
SHUTDOWN = err(1053, "Server shutdown in progress", "08S01")
ZSTD = Capability(1 << 26)
COMPRESSED = Capability.COMPRESS | ZSTD


def auth_switch_request(plugin: bytes) -> bytes:
    """Return an AuthSwitchRequest with a salt."""
    return b"\xfe" + plugin + b"\0" + b"a" * 20 + b"\0"


AUTH_REQUESTS = {
    "caching_sha2_password": FULL_AUTHENTICATION,
    "mysql_clear_password": auth_switch_request(b"mysql_clear_password"),
    "mysql_clear_password, no NUL": b"\xfemysql_clear_password",  # MySQL's client accepts this
    "sha256_password": auth_switch_request(b"sha256_password"),
    "dialog": auth_switch_request(b"dialog"),
    "OpenID": auth_switch_request(b"authentication_openid_connect_client"),
}


@dataclass
class PasswordRequestingNode:
    """A node without TLS that accepts every login and requests the password at COM_CHANGE_USER.

    It answers COM_STMT_SEND_LONG_DATA with ERR and other commands with OK, until it gets the password.
    """

    auth_request: bytes = FULL_AUTHENTICATION
    shuts_down: bool = False
    offered: Capability = OFFERED_CAPABILITIES
    login: bytes = b""
    received: bytes = b""

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
                self.received += payload
                if payload == CHANGE_USER:
                    writer.write(frame(1, self.auth_request))
                elif payload[:1] == b"\x18":
                    writer.write(frame(1, err(1105, "no such statement", "HY000")))
                elif PASSWORD in payload:
                    writer.close()
                    return
                else:
                    writer.write(frame(1, OK_PAYLOAD))
        self.received += await reader.read()
        writer.close()


@pytest.fixture
def certificates(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


@asynccontextmanager
async def run_with_node(
    directory: Path, node: PasswordRequestingNode, config: ModuleConfig
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy in front of `node`. After the block, `node.received` is complete."""
    async with run_fake_server(node.serve) as peer, run_envoy(directory, [peer.endpoint], config) as proxy:
        yield proxy
        for client in proxy.clients:
            client.writer.transport.abort()
        for _ in range(peer.connections):
            await with_timeout(peer.connection_ends.get())


async def change_user(client: RawClient) -> bytes:
    """Send COM_CHANGE_USER and then the password. Return all that the client receives."""
    try:
        client.writer.write(frame(0, CHANGE_USER))
        sequence, response = await with_timeout(client.read_packet())
        if response[0] == 0xFF:
            # A careless client sends its password even after an error.
            client.writer.write(frame(sequence + 1, PASSWORD))
            assert await read_to_end(client) == b""
            return response
        client.writer.write(frame(sequence + 1, PASSWORD))
        return response + await read_to_end(client)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.parametrize("name", ["node.1:4000", "tidb-.example:4000", "-a.b:4000"])
async def test_node_with_an_invalid_certificate_name_receives_no_login(
    tmp_path: Path, name: str, verify: str
) -> None:
    received = bytearray()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        while data := await reader.read(65_536):
            received.extend(data)

    config = ModuleConfig(node={"tls": "required", "verify": verify}, live_settings={"login_timeout": 5})
    async with (
        run_fake_server(record) as peer,
        run_envoy(tmp_path, [Host(peer.endpoint, name)], config) as proxy,
    ):
        client = await proxy.connect()
        greeting = asyncio.create_task(client.read_packet())
        with contextlib.suppress(asyncio.IncompleteReadError):  # Envoy may send no greeting
            if (await with_timeout(greeting))[1][:1] == b"\x0a":
                client.writer.write(login_packet(user=USER))
        response = await read_to_end(client)
        # Without verification of names Envoy may try TLS, which this node does not answer.
        codes = (b"", b"\xff\x51\x04") if verify == "full" else (b"", b"\xff\x51\x04", b"\xff\x87\x04")
        assert response[4:7] in codes
        for _ in range(peer.connections):
            await with_timeout(peer.connection_ends.get())
        assert USER.encode() not in received
        # Envoy sent at most an SSLRequest and a TLS record, but no byte of the login.
        assert bytes(received[:4]) in (b"", b"\x20\0\0\x01")
        assert bytes(received[36:39]) in (b"", b"\x16\x03\x01")


@pytest.mark.parametrize("auth_request", AUTH_REQUESTS.values(), ids=AUTH_REQUESTS.keys())
async def test_change_user_does_not_expose_a_password(
    tmp_path: Path, certificates: PemFiles, auth_request: bytes
) -> None:
    node = PasswordRequestingNode(auth_request)
    async with run_with_node(tmp_path, node, client_tls_config(certificates)) as proxy:
        response = await change_user(await connect_with_tls(proxy, certificates))
    assert CHANGE_USER in node.received
    assert PASSWORD not in node.received
    assert response.startswith(b"\xff\x51\x04#HY000Tidevoy: the password would go to TiDB in clear text")


@pytest.mark.parametrize("auth_request", AUTH_REQUESTS.values(), ids=AUTH_REQUESTS.keys())
async def test_change_user_sends_cleartext_if_allowed(
    tmp_path: Path, certificates: PemFiles, auth_request: bytes
) -> None:
    node = PasswordRequestingNode(auth_request)
    async with run_with_node(
        tmp_path, node, client_tls_config(certificates, allow_cleartext_backend=True)
    ) as proxy:
        assert await change_user(await connect_with_tls(proxy, certificates)) == auth_request
    assert node.received.endswith(PASSWORD)


@dataclass
class PasswordRequestingTlsNode:
    """A node with TLS that accepts every login, and requests the password at the first command."""

    certificates: PemFiles
    auth_request: bytes
    received: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await RawClient(reader, writer).read_packet()
            node = TlsNode(reader, writer, server_context(self.certificates))
            await node.handshake()
            for response in (OK_PAYLOAD, self.auth_request, OK_PAYLOAD):
                sequence, payload = await node.read_packet()
                self.received.append(payload)
                node.write(frame(sequence + 1, response))
            await node.read_packet()
        writer.close()


@pytest.mark.parametrize("client_tls", [False, True], ids=["client plain", "client TLS"])
@pytest.mark.parametrize(
    "auth_request", [FULL_AUTHENTICATION, AUTH_REQUESTS["sha256_password"]], ids=["caching_sha2", "sha256"]
)
async def test_change_user_that_needs_a_password_needs_tls_with_the_client(
    tmp_path: Path, certificates: PemFiles, auth_request: bytes, client_tls: bool
) -> None:
    node = PasswordRequestingTlsNode(certificates, auth_request)
    client_config = client_tls_config(certificates, "optional").client
    config = ModuleConfig(client=client_config, node={"tls": "required", "ca": str(certificates.ca)})
    async with run_fake_server(node.serve) as peer, run_envoy(tmp_path, [peer.endpoint], config) as proxy:
        client = await (connect_with_tls(proxy, certificates) if client_tls else connect_logged_in(proxy))
        client.writer.write(frame(0, CHANGE_USER))
        sequence, response = await with_timeout(client.read_packet())
        assert sequence == 1
        if client_tls:
            assert response == auth_request
            client.writer.write(frame(2, PASSWORD))
            assert await with_timeout(client.read_packet()) == (3, OK_PAYLOAD)
        else:
            text = b"Tidevoy: a change of user to an account with caching_sha2_password"
            assert response.startswith(b"\xff\xd3\x04#42000" + text)
            assert await read_to_end(client) == b""
        client.writer.transport.abort()
        await with_timeout(peer.connection_ends.get())
    assert node.received[1:] == [CHANGE_USER, *([PASSWORD] if client_tls else [])]


@pytest.mark.parametrize("plugin", [b"mysql_native_password", b"client_ed25519"])
async def test_change_user_with_a_hash_is_forwarded(
    tmp_path: Path, certificates: PemFiles, plugin: bytes
) -> None:
    node = PasswordRequestingNode(auth_switch_request(plugin))
    async with run_with_node(tmp_path, node, client_tls_config(certificates)) as proxy:
        client = await connect_with_tls(proxy, certificates)
        assert await with_timeout(
            client.send_command(CHANGE_USER[0], CHANGE_USER[1:])
        ) == auth_switch_request(plugin)
        client.writer.write(frame(2, b"a hash"))
        assert (await with_timeout(client.read_packet()))[1] == OK_PAYLOAD
    assert node.received == CHANGE_USER + b"a hash"


async def read_unsolicited_error(client: RawClient) -> None:
    """Read an ERR that the node sends without a command. This ERR makes the session opaque."""
    assert (await with_timeout(client.read_packet()))[1] == SHUTDOWN


async def pipeline_many_commands(client: RawClient) -> None:
    """Pipeline more commands than the module tracks."""
    client.writer.write(b"".join(frame(0, kind) for kind in (b"\x0e", b"\x03do 1") * 10))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        for _ in range(20):
            await with_timeout(client.read_packet())


async def fail_long_data(client: RawClient) -> None:
    """Send COM_STMT_SEND_LONG_DATA, which has no response unless it fails, and read the ERR."""
    client.writer.write(frame(0, b"\x18\x01\0\0\0\0\0data"))
    assert (await with_timeout(client.read_packet()))[1][:1] == b"\xff"


Incident = Callable[[RawClient], Awaitable[None]]
INCIDENTS: dict[str, Incident] = {
    "an unsolicited ERR": read_unsolicited_error,
    "many pipelined commands": pipeline_many_commands,
    "an ERR to long data": fail_long_data,
}


@pytest.mark.parametrize("allowed", [False, True], ids=["forbidden", "allowed"])
@pytest.mark.parametrize("incident", INCIDENTS.values(), ids=INCIDENTS.keys())
async def test_session_cannot_expose_its_password_after_an_incident_unless_allowed(
    tmp_path: Path, certificates: PemFiles, incident: Incident, allowed: bool
) -> None:
    """The first two incidents make the session opaque. After the last one, it can still be followed."""
    node = PasswordRequestingNode(shuts_down=incident is read_unsolicited_error)
    async with run_with_node(
        tmp_path, node, client_tls_config(certificates, allow_cleartext_backend=allowed)
    ) as proxy:
        client = await connect_with_tls(proxy, certificates)
        await incident(client)
        response = await change_user(client)
    assert (PASSWORD in node.received) == allowed
    if allowed:
        assert response == FULL_AUTHENTICATION
    else:
        assert response[:1] in (b"", b"\xff")


@pytest.mark.parametrize(
    ("client", "node_tls", "allowed", "is_offered"),
    [
        ("required", False, False, False),
        ("optional", False, False, False),
        ("required", False, True, True),
        ("required", True, False, True),
        ("disabled", False, False, True),
    ],
)
async def test_compression_is_offered_only_if_it_can_hide_no_password(
    tmp_path: Path, certificates: PemFiles, client: str, node_tls: bool, allowed: bool, is_offered: bool
) -> None:
    node = PasswordRequestingNode(
        offered=OFFERED_CAPABILITIES | COMPRESSED | (Capability.SSL if node_tls else Capability(0))
    )
    config = client_tls_config(
        certificates, client, allow_cleartext_backend=allowed, passthrough_compression=True
    )
    node_tls_settings = {"tls": "required" if node_tls else "disabled", "ca": str(certificates.ca)}
    config = ModuleConfig(client=config.client, node={**config.node, **node_tls_settings})
    async with run_with_node(tmp_path, node, config) as proxy:
        _, greeting = await with_timeout((await proxy.connect()).read_packet())
        offered = parse_greeting(greeting).capabilities & COMPRESSED
    assert offered == (COMPRESSED if is_offered else Capability(0))


async def test_client_that_compresses_without_an_offer_is_rejected(
    tmp_path: Path, certificates: PemFiles
) -> None:
    node = PasswordRequestingNode(offered=OFFERED_CAPABILITIES | COMPRESSED)
    async with run_with_node(
        tmp_path, node, client_tls_config(certificates, passthrough_compression=True)
    ) as proxy:
        error = b"\xff\xd3\x04#42000Tidevoy: "
        client = await connect_with_tls(proxy, certificates, CAPABILITIES | COMPRESSED, answer=error)
        assert await read_to_end(client) == b""
    assert not node.login

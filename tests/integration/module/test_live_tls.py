"""A running Envoy with the module applies changed TLS settings to new connections, and ends no session."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from sandbox.ports import Ports
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, frame
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import make_node_plan, make_plan, run_xds_test_bed
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import require_module
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet, login_packet, serve_ok, with_timeout
from tests.support.module.live_settings import LiveEnvoy, run_live_envoy
from tests.support.module.revocation import RevokingCa
from tests.support.module.tls_node import TlsNode, server_context
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

_SSL_REQUEST_BYTES = 32
_FULL_AUTHENTICATION = b"\x01\x04"
_PUBLIC_KEY_REQUEST = b"\x02"
_CLEAR_PASSWORD_REQUEST = b"\xfemysql_clear_password\0\0"


@dataclass
class Node:
    """A fake node that accepts TLS. `answer` is its answer to new logins."""

    context: ssl.SSLContext
    answer: bytes = OK_PAYLOAD
    tls_connections: int = 0
    client_certificates: list[bytes | None] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL))
        peer: RawClient | TlsNode = RawClient(reader, writer)
        write: Callable[[bytes], None] = writer.write
        sequence, payload = await peer.read_packet()
        if len(payload) == _SSL_REQUEST_BYTES:
            peer = tls = TlsNode(reader, writer, self.context)
            write = tls.write
            with contextlib.suppress(ssl.SSLError, asyncio.IncompleteReadError):
                await tls.handshake()
                self.tls_connections += 1
                self.client_certificates.append(tls.peer_certificate())
                sequence, _ = await peer.read_packet()
        write(frame(sequence + 1, self.answer))
        with contextlib.suppress(ssl.SSLError, asyncio.IncompleteReadError):
            while True:
                await peer.read_packet()
                write(frame(1, OK_PAYLOAD))


class World:
    """Two CAs with certificates, and a node whose certificate is of the first one."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.other_ca = RevokingCa(directory / "ca"), RevokingCa(directory / "other-ca")
        self.server, self.other_server = self.ca.issue("server"), self.other_ca.issue("server")
        self.client, self.revoked = self.ca.issue("client"), self.ca.issue("revoked")
        self.other_ca.revoke(self.other_server)
        self.ca.revoke(self.revoked)
        self.keys = [directory / "one.pem", directory / "other.pem"]
        for path in self.keys:
            key = rsa.generate_private_key(65537, 2048)
            pkcs8, unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            path.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, unencrypted))
        context = server_context(self.server)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(self.ca.cert)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        self.node = Node(context)

    @property
    def client_tls(self) -> dict[str, Any]:
        return {"mode": "optional", "cert": str(self.server.cert), "key": str(self.server.key)}

    @property
    def node_tls(self) -> dict[str, Any]:
        return {"mode": "required", "ca": str(self.ca.cert), "verify": "ca"}

    def context(self, ca: RevokingCa | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts this CA, by default the first one."""
        return ssl.create_default_context(cafile=str((ca or self.ca).cert))


async def login_response(live: LiveEnvoy, context: ssl.SSLContext | None = None) -> bytes:
    """Log in, over TLS if there is a context. Return the response; empty if the connection fails."""
    client = await live.connect()
    try:
        _, greeting = await with_timeout(client.read_packet())
        if greeting[:1] == b"\xff":
            return greeting
        if context is None:
            return await with_timeout(client.send_login())
        version_end = greeting.index(b"\0", 1)
        if not int.from_bytes(greeting[version_end + 14 : version_end + 16], "little") & Capability.SSL:
            return b""
        capabilities = CAPABILITIES | Capability.SSL
        client.writer.write(frame(1, login_packet(capabilities)[4:36]))
        await with_timeout(client.writer.start_tls(context, server_hostname="localhost"))
        client.writer.write(login_packet(capabilities, sequence=2))
        return (await with_timeout(client.read_packet()))[1]
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        client.writer.transport.abort()


Effect = Callable[[LiveEnvoy, World], Awaitable[bool]]


async def is_tls_served(live: LiveEnvoy, world: World) -> bool:
    return await login_response(live, world.context()) == OK_PAYLOAD


async def is_other_certificate_served(live: LiveEnvoy, world: World) -> bool:
    return await login_response(live, world.context(world.other_ca)) == OK_PAYLOAD


async def is_clear_text_refused(live: LiveEnvoy, world: World) -> bool:
    return (await login_response(live))[:1] == b"\xff"


async def is_client_without_certificate_refused(live: LiveEnvoy, world: World) -> bool:
    return await login_response(live, world.context()) == b""


async def is_revoked_client_refused(live: LiveEnvoy, world: World) -> bool:
    context = world.context()
    context.load_cert_chain(world.revoked.cert, world.revoked.key)
    return await login_response(live, context) == b""


async def is_old_tls_refused(live: LiveEnvoy, world: World) -> bool:
    context = world.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return await login_response(live, context) == b""


async def is_other_public_key_sent(live: LiveEnvoy, world: World) -> bool:
    """Whether a client without TLS gets the public part of the second key for its password."""
    client = await live.connect()
    await with_timeout(client.read_packet())
    try:
        response = await with_timeout(client.send_login(plugin="caching_sha2_password"))
        assert response == _FULL_AUTHENTICATION, response
        client.writer.write(frame(3, _PUBLIC_KEY_REQUEST))
        _, sent = await with_timeout(client.read_packet())
    finally:
        client.writer.transport.abort()
    private = serialization.load_pem_private_key(world.keys[1].read_bytes(), None)
    assert isinstance(private, rsa.RSAPrivateKey)
    public = serialization.load_pem_public_key(sent[1:])
    assert isinstance(public, rsa.RSAPublicKey)
    return public.public_numbers() == private.public_key().public_numbers()


async def is_tls_used_with_the_node(live: LiveEnvoy, world: World) -> bool:
    before = world.node.tls_connections
    assert await login_response(live) == OK_PAYLOAD
    return world.node.tls_connections > before


async def is_node_trusted(live: LiveEnvoy, world: World) -> bool:
    return await login_response(live) == OK_PAYLOAD


async def is_node_refused(live: LiveEnvoy, world: World) -> bool:
    return await login_response(live) != OK_PAYLOAD


async def is_certificate_presented(live: LiveEnvoy, world: World) -> bool:
    assert await login_response(live) == OK_PAYLOAD
    return world.node.client_certificates[-1] is not None


async def is_clear_password_requested(live: LiveEnvoy, world: World) -> bool:
    """Whether a client with TLS is asked for its password by a node without TLS."""
    return (await login_response(live, world.context()))[:1] == b"\xfe"


@dataclass(frozen=True)
class Change:
    """Changed settings of the section `tls`. `changes` returns the values before and after."""

    name: str
    changes: Callable[[World], tuple[dict[str, Any], dict[str, Any]]]
    is_in_force: Effect
    answer: bytes = OK_PAYLOAD  # of the node to new logins


def client(before: Callable[[World], dict[str, Any]], after: Callable[[World], dict[str, Any]]) -> Any:
    return lambda world: (
        {"client": world.client_tls | before(world)},
        {"client": world.client_tls | after(world)},
    )


def backend(before: Callable[[World], dict[str, Any]], after: Callable[[World], dict[str, Any]]) -> Any:
    return lambda world: (
        {"backend": world.node_tls | before(world)},
        {"backend": world.node_tls | after(world)},
    )


def nothing(world: World) -> dict[str, Any]:
    return {}


_CHANGES = [
    Change("client.mode optional", lambda world: ({}, {"client": world.client_tls}), is_tls_served),
    Change("client.mode required", client(nothing, lambda _: {"mode": "required"}), is_clear_text_refused),
    Change(
        "client.cert and key",
        client(
            nothing,
            lambda world: {"cert": str(world.other_server.cert), "key": str(world.other_server.key)},
        ),
        is_other_certificate_served,
    ),
    Change(
        "client.client_ca",
        client(nothing, lambda world: {"client_ca": str(world.ca.cert)}),
        is_client_without_certificate_refused,
    ),
    Change(
        "client.crl",
        client(
            lambda world: {"client_ca": str(world.ca.cert)},
            lambda world: {"client_ca": str(world.ca.cert), "crl": str(world.ca.crl)},
        ),
        is_revoked_client_refused,
    ),
    Change("client.min_version", client(nothing, lambda _: {"min_version": "TLSv1.3"}), is_old_tls_refused),
    Change(
        "client.rsa_key",
        lambda world: (
            {"backend": world.node_tls, "client": {"rsa_key": str(world.keys[0])}},
            {"backend": world.node_tls, "client": {"rsa_key": str(world.keys[1])}},
        ),
        is_other_public_key_sent,
        answer=_FULL_AUTHENTICATION,
    ),
    Change("backend.mode", lambda world: ({}, {"backend": world.node_tls}), is_tls_used_with_the_node),
    Change("backend.ca", backend(nothing, lambda world: {"ca": str(world.other_ca.cert)}), is_node_refused),
    Change(
        "backend.verify",
        lambda world: (
            {"backend": world.node_tls | {"ca": str(world.other_ca.cert)}},
            {"backend": {"mode": "required", "verify": "none"}},
        ),
        is_node_trusted,
    ),
    Change(
        "backend.cert and key",
        backend(nothing, lambda world: {"cert": str(world.client.cert), "key": str(world.client.key)}),
        is_certificate_presented,
    ),
    Change("backend.min_version", backend(nothing, lambda _: {"min_version": "TLSv1.3"}), is_node_refused),
    Change(
        "backend.crl",
        backend(nothing, lambda world: {"crl": str(world.other_ca.crl)}),
        is_node_refused,  # the list is of another CA, so the node's certificate has none
    ),
    Change(
        "allow_cleartext_backend",
        lambda world: (
            {"client": world.client_tls},
            {"client": world.client_tls, "allow_cleartext_backend": True},
        ),
        is_clear_password_requested,
        answer=_CLEAR_PASSWORD_REQUEST,
    ),
]


@pytest.mark.parametrize("change", _CHANGES, ids=[change.name for change in _CHANGES])
async def test_changed_tls_setting_applies_to_new_connections(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy, change: Change
) -> None:
    world = World(tmp_path)
    before, after = change.changes(world)
    async with run_live_envoy(ports, envoy_process, {"tls": before}, handler=world.node.serve) as live:
        sessions = [await live.log_in() for _ in range(3)] if change.name != "backend.verify" else []
        world.node.answer = change.answer

        async def is_in_force() -> bool:
            return await change.is_in_force(live, world)

        assert not await is_in_force()
        live.change({"tls": after})
        seconds = await live.seconds_until(is_in_force)
        print(f"\ntls.{change.name}: in force after {seconds:.3f} s")
        await live.expect_undisturbed(sessions)
        live.change({"tls": before})

        async def is_not_in_force() -> bool:
            return not await is_in_force()

        await wait_until(is_not_in_force)
        await live.expect_undisturbed(sessions)


async def refusals(live: LiveEnvoy) -> str:
    """Return the series of rejected configurations."""
    return (await live.test_bed.envoy.get("/stats/prometheus?filter=config_refusals")).text


async def test_unusable_files_keep_the_old_tls_settings_and_stop_nothing_else(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    world = World(tmp_path)
    missing = tmp_path / "missing"
    tls = {"client": world.client_tls}
    async with (
        run_live_envoy(ports, envoy_process, {"tls": tls}, handler=world.node.serve) as live,
        run_fake_server(serve_ok) as other_node,
    ):
        sessions = [await live.log_in() for _ in range(3)]
        changed = {"cert": str(missing / "cert.pem"), "key": str(missing / "key.pem")}
        live.change({"tls": {"client": world.client_tls | changed}, "sql": {"max_connections": 5}})

        async def is_reported() -> bool:
            text = await refusals(live)
            return 'extension="client"' in text and "cert.pem" in text and "stay in force" in text

        await wait_until(is_reported)
        assert await is_tls_served(live, world)
        # The nodes and the other settings are applied.
        first = make_node_plan("n0:4000", live.nodes.servers[0].endpoint)
        await live.test_bed.publish(make_plan(first, make_node_plan("other:4000", other_node.endpoint)))
        await wait_until(live.test_bed.is_acked)
        more = [await live.log_in() for _ in range(2)]
        assert other_node.connections > 0
        await wait_until(lambda: _is_full(live))
        more[0].writer.transport.abort()
        # Once the files are there, they are used without another change of the settings.
        missing.mkdir()
        shutil.copy(world.other_server.cert, missing / "cert.pem")
        shutil.copy(world.other_server.key, missing / "key.pem")
        seconds = await live.seconds_until(lambda: is_other_certificate_served(live, world))
        print(f"\nfiles that appear: in force after {seconds:.3f} s")
        text = await refusals(live)
        assert text.count("cert.pem") == 1
        await live.expect_undisturbed([*sessions, more[1]])


async def _is_full(live: LiveEnvoy) -> bool:
    return (await live.first_payload() or b"").startswith(b"\xff\x10\x04")


async def test_new_envoy_with_unusable_files_gets_no_listener_with_the_module(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    world = World(tmp_path)
    tls = {"client": world.client_tls | {"mode": "required", "cert": "/no/cert.pem"}}
    async with run_xds_test_bed(
        ports, envoy_process, settings={"tls": tls}, module=require_module()
    ) as test_bed:
        test_bed.server.publish(make_plan(make_node_plan("n0:4000", "127.0.0.1:1")))
        await wait_until(lambda: "envoy.problem" in test_bed.event_kinds())
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", test_bed.sql_port)
        # Then the settings are corrected.
        test_bed.settings = test_bed.with_settings({"tls": {"client": world.client_tls}})
        test_bed.server.configure(test_bed.settings)
        await wait_until(test_bed.envoy.is_live)
        await wait_until(lambda: test_bed.status.filter == "module" and test_bed.is_acked())

"""Logins and changes of user that the module rejects, although the node would accept them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import Capability, frame, lenenc_bytes
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    accept_login,
    connect_logged_in,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

SESSION_TOKEN_PLUGIN = b"tidb_session_token"
MAX_ATTRIBUTES_BYTES = 64 * 1024
WITH_ATTRIBUTES = CAPABILITIES | Capability.CONNECT_ATTRS
SWITCH_TO_SESSION_TOKEN = b"\xfe" + SESSION_TOKEN_PLUGIN + b"\0" + b"a" * 20 + b"\0"
SESSION_TOKEN_ERROR = b"\xff\x15\x04#28000Tidevoy: access denied: only Tidevoy itself may use"
ATTRIBUTES_ERROR = b"\xff\x81\x04#08S01Tidevoy: the connection attributes are larger than 64 KiB"


class RecordingNode:
    """A node that accepts all logins, records all packets, and answers each command with `answer`."""

    def __init__(self, answer: bytes = OK_PAYLOAD) -> None:
        self.answer = answer
        self.packets: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                self.packets.append((await node.read_packet())[1])
                writer.write(frame(1, self.answer))
        writer.close()


@asynccontextmanager
async def run_proxy(
    directory: Path, node: RecordingNode, config: ModuleConfig | None = None
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy in front of `node`. After the block, `node.packets` is complete."""
    async with run_fake_server(node.serve) as peer, run_envoy(directory, [peer.endpoint], config) as proxy:
        yield proxy
        for client in proxy.clients:
            client.writer.transport.abort()
        for _ in range(peer.connections):
            await with_timeout(peer.connection_ends.get())
        await proxy.wait_no_sessions(peer.endpoint)


def attributes(size: int) -> bytes:
    """Return `size` bytes of connection attributes, with their length."""
    return lenenc_bytes(bytes(size))


def change_user(plugin: bytes = b"mysql_native_password", attributes: bytes = b"") -> bytes:
    """Return the payload of COM_CHANGE_USER (MySQL: "Protocol::COM_CHANGE_USER")."""
    return b"\x11root\0\0\0-\0" + plugin + b"\0" + attributes


async def log_in(proxy: ModuleEnvoy, packet: bytes) -> bytes:
    """Send the packet of a login. Return the payload of the response."""
    client = await proxy.connect()
    await with_timeout(client.read_packet())
    client.writer.write(packet)
    sequence, payload = await with_timeout(client.read_packet())
    assert sequence == 2
    return payload


async def expect_session_end(client: RawClient, packets: bytes, error: bytes) -> None:
    """Send a command in two parts. The error must answer it, and the session must end."""
    client.writer.write(packets[:20])
    client.writer.write(packets[20:])
    sequence, payload = await with_timeout(client.read_packet())
    assert (sequence, payload[: len(error)]) == (1, error)
    assert await read_to_end(client) == b""


async def wait_login_failures(proxy: ModuleEnvoy, reason: str, count: int) -> None:
    """Wait until `count` logins have failed for this reason."""

    async def are_reported() -> bool:
        metrics = await proxy.metrics()
        found = [
            value
            for (name, labels), value in metrics.items()
            if (name, labels[1:]) == ("login_failures", (reason,))
        ]
        return sum(found) == count

    await wait_until(are_reported)


async def test_login_with_the_session_token_plugin_is_rejected(tmp_path: Path) -> None:
    node = RecordingNode()
    plain = login_packet()[4:]
    token_login = plain.replace(b"mysql_native_password", SESSION_TOKEN_PLUGIN)
    async with run_proxy(tmp_path, node) as proxy:
        assert (await log_in(proxy, frame(1, token_login))).startswith(SESSION_TOKEN_ERROR)
        assert await log_in(proxy, frame(1, plain)) == OK_PAYLOAD
        await wait_login_failures(proxy, "session_token_plugin", 1)


@pytest.mark.parametrize("size", [MAX_ATTRIBUTES_BYTES, MAX_ATTRIBUTES_BYTES + 1])
async def test_attributes_of_a_login_have_a_limit(tmp_path: Path, size: int) -> None:
    async with run_proxy(tmp_path, RecordingNode()) as proxy:
        response = await log_in(proxy, frame(1, login_packet(WITH_ATTRIBUTES)[4:] + attributes(size)))
        if size <= MAX_ATTRIBUTES_BYTES:
            assert response == OK_PAYLOAD
        else:
            assert response.startswith(ATTRIBUTES_ERROR)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (change_user(SESSION_TOKEN_PLUGIN), SESSION_TOKEN_ERROR),
        (change_user(SESSION_TOKEN_PLUGIN, attributes(300)), SESSION_TOKEN_ERROR),
        (change_user(attributes=attributes(MAX_ATTRIBUTES_BYTES + 1)), ATTRIBUTES_ERROR),
        (change_user(attributes=attributes(2 * MAX_ATTRIBUTES_BYTES)), ATTRIBUTES_ERROR),
    ],
    ids=["session token", "session token and attributes", "attributes", "many attributes"],
)
async def test_change_user_is_rejected_and_does_not_reach_the_node(
    tmp_path: Path, command: bytes, error: bytes
) -> None:
    node = RecordingNode()
    async with run_proxy(tmp_path, node) as proxy:
        client = await connect_logged_in(proxy)
        # The connection is then served without Envoy.
        for _ in range(10):
            assert await with_timeout(client.send_command(0x0E)) == OK_PAYLOAD
        await expect_session_end(client, frame(0, command), error)
    assert node.packets == [b"\x0e"] * 10


async def test_pipelined_change_user_is_rejected_and_does_not_reach_the_node_whole(tmp_path: Path) -> None:
    node = RecordingNode()
    command = change_user(SESSION_TOKEN_PLUGIN)
    async with run_proxy(tmp_path, node) as proxy:
        client = await connect_logged_in(proxy)
        client.writer.write(frame(0, b"\x0e") + frame(0, command))
        # The ping may have been answered before.
        received = await read_to_end(client)
        assert received.removeprefix(frame(1, OK_PAYLOAD))[4:].startswith(SESSION_TOKEN_ERROR)
        await wait_login_failures(proxy, "session_token_plugin", 1)
    assert command not in node.packets


async def test_pipelined_change_user_with_another_plugin_is_forwarded(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_proxy(tmp_path, node) as proxy:
        client = await connect_logged_in(proxy)
        client.writer.write(frame(0, b"\x0e") + frame(0, change_user()))
        for _ in range(2):
            assert await with_timeout(client.read_packet()) == (1, OK_PAYLOAD)
        # Only a change of user is searched for the name.
        statement = b"\x03select 'tidb_session_token'"
        assert await with_timeout(client.send_command(statement[0], statement[1:])) == OK_PAYLOAD
    assert node.packets == [b"\x0e", change_user(), statement]


async def test_change_user_with_many_attributes_is_forwarded(tmp_path: Path) -> None:
    node = RecordingNode()
    command = change_user(attributes=attributes(MAX_ATTRIBUTES_BYTES))
    async with run_proxy(tmp_path, node) as proxy:
        client = await connect_logged_in(proxy)
        assert await with_timeout(client.send_command(command[0], command[1:])) == OK_PAYLOAD
    assert node.packets == [command]


async def test_node_cannot_request_a_session_token(tmp_path: Path) -> None:
    node = RecordingNode(SWITCH_TO_SESSION_TOKEN)
    async with run_proxy(tmp_path, node) as proxy:
        client = await connect_logged_in(proxy)
        await expect_session_end(client, frame(0, change_user()), SESSION_TOKEN_ERROR)
    assert node.packets == [change_user()]

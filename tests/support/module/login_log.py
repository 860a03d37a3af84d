"""Clients with any user and database, a node that denies some of them, and the lines of the login log."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.tidb_sim.packets import Capability, err, frame
from tests.support.module.envoy import OK_PAYLOAD, ModuleEnvoy, greeting_packet, with_timeout
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

_CHANGE_USER = 0x11


def login_log(path: Path | str, max_bytes: int = 0, keep: int = 0) -> dict[str, Any]:
    """Return the live settings that switch the log on."""
    return {"login_log": {"path": str(path), "max_bytes": max_bytes, "keep": keep}}


async def serve_users(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Deny the user `denied` and the database `missing`, also in a change of user (a handler of a node).

    The user `clear` must send the password in clear text.
    """
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    sequence, payload = await node.read_packet()
    writer.write(frame(sequence + 1, _answer(payload[32:])))
    while True:
        _, payload = await node.read_packet()
        writer.write(frame(1, _answer(payload[1:]) if payload[0] == _CHANGE_USER else OK_PAYLOAD))


def _answer(login: bytes) -> bytes:
    if login.startswith(b"denied\0"):
        return err(1045, "Access denied for user 'denied'", "28000")
    if login.startswith(b"clear\0"):
        return b"\xfemysql_clear_password\0"
    if b"secretmissing\0" in login:
        return err(1049, "Unknown database 'missing'", "42000")
    return OK_PAYLOAD


def user_packet(user: bytes, database: bytes = b"", plugin: bytes = b"mysql_native_password") -> bytes:
    """Build the whole packet of a client's response to the greeting."""
    head = struct.pack("<IIB23x", CAPABILITIES | Capability.CONNECT_WITH_DB, 1 << 24, 45)
    return frame(1, head + user + b"\0\x06secret" + database + b"\0" + plugin + b"\0")


async def log_in_as(
    envoy: ModuleEnvoy, user: bytes, database: bytes = b"", *, source: str = "", header: bytes = b""
) -> tuple[RawClient, bytes]:
    """Log in after the PROXY header `header`. Return the client and the payload of the response."""
    client = await envoy.connect(source)
    client.writer.write(header)
    await with_timeout(client.read_packet())
    client.writer.write(user_packet(user, database))
    return client, (await with_timeout(client.read_packet()))[1]


async def change_user(
    client: RawClient, user: bytes, database: bytes = b"", plugin: bytes = b"mysql_native_password"
) -> bytes:
    """Send COM_CHANGE_USER. Return the payload of the response."""
    body = user + b"\0\x06secret" + database + b"\0-\0" + plugin + b"\0"
    return await with_timeout(client.send_command(_CHANGE_USER, body))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log, each of which must be a JSON object."""
    text = path.read_text(encoding="ascii") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


async def wait_for_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Wait until the log has `count` lines, and return them."""
    await wait_until(lambda: len(read_lines(path)) >= count)
    lines = read_lines(path)
    assert len(lines) == count, lines
    return lines


def subset(line: Mapping[str, Any], *keys: str) -> tuple[Any, ...]:
    """Return these values of a line."""
    return tuple(line[key] for key in keys)

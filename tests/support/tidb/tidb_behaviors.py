"""Behavior of TiDB on which Tidevoy relies. Each function examines one server, real or simulated."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from controlplane.etcd.client import EtcdClient
from sandbox.cluster import Cluster
from sandbox.server import accepts_connections, http_client
from sandbox.tidb import Tidb
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, parse_greeting
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

Behavior = Callable[[Tidb], Awaitable[Any]]
_TIMEOUT_SECONDS = 10.0
_MAX_LOGIN_WAIT_SECONDS = 11.0
"""Longer than Tidevoy's `sql.login_timeout` (8 s) and MariaDB's `connect_timeout` (10 s)."""
_LOGIN = struct.Struct("<IIB23x")
_ZSTD = Capability(1 << 26)
"""CLIENT_ZSTD_COMPRESSION_ALGORITHM, which the simulated server does not offer."""


@asynccontextmanager
async def open_connection(node: Tidb) -> AsyncIterator[RawClient]:
    """Connect without sending anything. Reset the connection at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def logged_in(node: Tidb, *statements: str) -> AsyncIterator[RawClient]:
    """Yield a session of root in which these statements have been executed."""
    async with open_connection(node) as client:
        assert (await client.login())[0] == 0x00
        for statement in statements:
            assert (await client.query(statement))[0] == 0x00
        yield client


async def read_until_end(client: RawClient, seconds: float = _TIMEOUT_SECONDS) -> tuple[bytes, str]:
    """Return the data until the connection ends, and how it ends: `FIN`, `RST`, or `open` if it does not."""
    received = b""
    try:
        async with asyncio.timeout(seconds):
            while data := await client.reader.read(65536):
                received += data
            return received, "FIN"
    except ConnectionResetError:
        return received, "RST"
    except TimeoutError:
        return received, "open"


async def greeting(node: Tidb) -> Any:
    """Examine the first packet, except release, connection id and salt."""
    async with open_connection(node) as client:
        sequence, payload = await client.read_packet()
    parsed = parse_greeting(payload)
    remaining = payload[payload.index(0) + 1 :]
    version, _, release = parsed.version.partition("-TiDB-v")
    return {
        "sequence": sequence,
        "version": version,
        "has a release": bool(release),
        "capabilities": parsed.capabilities & ~_ZSTD,
        "collation and status": remaining[15:18],
        "salt": (remaining[4:12].isascii(), remaining[12], len(remaining[31:43]), remaining[43]),
        "plugin": remaining[44:],
    }


async def status_page(node: Tidb) -> Any:
    """Examine `/status` and `/info` of the status port: keys and types of values."""
    async with http_client(node.status_url) as client:
        status, info = await client.get("/status"), await client.get("/info")
        nowhere = await client.get("/nowhere")
    return {
        "status": (status.status_code, status.headers["content-type"], _json_shape(status.json())),
        "info": _json_shape(info.json()),
        "nowhere": nowhere.status_code,
    }


async def kill_of_an_idle_session(node: Tidb) -> Any:
    """The client receives a FIN and no error."""
    async with logged_in(node) as killed, logged_in(node) as killer:
        ((connection_id,),) = await killed.rows("select connection_id()")
        return await killer.query(f"kill {connection_id}"), await read_until_end(killed)


async def kill_of_a_busy_session(node: Tidb) -> Any:
    """The client receives no error, even during a statement."""
    async with logged_in(node) as killed, logged_in(node) as killer:
        ((connection_id,),) = await killed.rows("select connection_id()")
        killed.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + b"select sleep(30)"))

        async def is_busy() -> bool:
            sessions = await killer.rows("select id, command from information_schema.processlist")
            return (connection_id, "Query") in sessions

        await wait_until(is_busy)
        return await killer.query(f"kill {connection_id}"), await read_until_end(killed)


async def kill_of_an_unknown_session(node: Tidb) -> Any:
    """KILL of an unknown session is no error."""
    async with logged_in(node) as killer:
        return [await killer.query(f"kill {option} 4242424242") for option in ("", "connection", "query")]


async def wait_timeout(node: Tidb) -> Any:
    """The client receives a FIN and no error."""
    async with logged_in(node, "set session wait_timeout = 1") as client:
        started_at = time.monotonic()
        end = await read_until_end(client)
        return end, 0.5 < time.monotonic() - started_at < 3.0


async def client_that_does_not_log_in(node: Tidb) -> Any:
    """After its greeting, a server waits for the login longer than Tidevoy does."""
    async with open_connection(node) as client:
        await client.read_packet()
        return await read_until_end(client, _MAX_LOGIN_WAIT_SECONDS)


async def refused_logins(node: Tidb) -> Any:
    """Examine logins with an unknown user, an unknown database, and the old protocol."""
    ends = []
    for user, database, capabilities in (
        (b"nobody", b"", CAPABILITIES),
        (b"root", b"nowhere", CAPABILITIES | Capability.CONNECT_WITH_DB),
        (b"root", b"", CAPABILITIES & ~Capability.PROTOCOL_41),
    ):
        async with open_connection(node) as client:
            await client.read_packet()
            database_field = database + b"\0" if database else b""
            head = _LOGIN.pack(capabilities, 1 << 24, 45) + user + b"\0\0"
            client.writer.write(frame(1, head + database_field + NATIVE_PASSWORD.encode() + b"\0"))
            ends.append(await read_until_end(client))
    return ends


async def commands(node: Tidb) -> Any:
    """Examine the responses to rare and unknown commands, and to commands for unknown statements."""
    statement_id = (99).to_bytes(4, "little")
    requests = {
        "ping": b"\x0e",
        "reset": b"\x1f",
        "unknown": b"\x77",
        "debug": b"\x0d",
        "multi statements off": b"\x1b\1\0",
        "create database": b"\x05x",
        "execute": b"\x17" + statement_id + b"\0\1\0\0\0",
        "reset statement": b"\x1a" + statement_id,
        "fetch": b"\x1c" + statement_id + b"\1\0\0\0",
    }
    responses = {}
    for name, command in requests.items():
        async with logged_in(node) as client:
            client.writer.write(frame(0, command))
            responses[name] = await client.read_packet()
    return responses


async def statements(node: Tidb) -> Any:
    """Examine the responses to statements without rows. Texts of syntax errors are excluded."""
    responses = {}
    async with logged_in(node) as client:
        for statement in (
            *("", ";", "/* nothing */", "begin", "commit", "start transaction", "rollback"),
            *("set autocommit = 0", "set autocommit = 1", "use nowhere", "select * from nowhere.t"),
            *("set nosuch = 1", "begin foo", "set @a = 1", "kill"),
        ):
            response = await client.send_command(MySqlCommand.QUERY, statement.encode())
            is_syntax = response[:3] == b"\xff" + (1064).to_bytes(2, "little")
            responses[statement] = response[:9] if is_syntax else response
    return responses


async def states(node: Tidb) -> Any:
    """Examine SHOW SESSION_STATES of a new session and after many changes, and the shape of the token."""
    async with logged_in(node) as client:
        fresh, token = await client.export_states()
        await client.query("set @a = 1, @b = 'x'")
        await client.query("use mysql")
        await client.query("prepare s from 'select ? + 1'")
        statement_id = await client.prepare(b"select ?, 'x'")
        await client.rows("select 1 union select 2")
        full, _ = await client.export_states()
    excluded = ("sys-vars", "user-var-values", "user-var-types", "rs-group", "query-info")
    return {
        "fresh": {key: value for key, value in fresh.items() if key not in excluded},
        "full": {key: value for key, value in full.items() if key not in excluded},
        "variables": sorted(full["user-var-values"]) == sorted(full["user-var-types"]) == ["a", "b"],
        "settings": {name: full["sys-vars"][name] for name in ("autocommit", "character_set_client")},
        "number": statement_id,
        "token": _json_shape(json.loads(token)),
    }


async def empty_states(node: Tidb) -> Any:
    """SET SESSION_STATES resets what the states do not contain."""
    async with logged_in(node, "prepare s from 'select 1'") as client:
        first = await client.prepare(b"select 1")
        await client.export_states()
        response = await client.query("set session_states '{}'")
        after = await client.rows("select row_count(), found_rows(), last_insert_id()")
        return response[0], after, first, await client.prepare(b"select 2")


async def registration(cluster: Cluster, node: Tidb) -> Any:
    """Examine the keys in PD: names, whether they have leases, and the shape of the values."""
    prefix = f"/topology/tidb/{node.address}"
    async with EtcdClient([cluster.pd_url]) as client:
        entries = (await client.range(prefix)).entries
    info, ttl = entries[f"{prefix}/info"], entries[f"{prefix}/ttl"]
    return {
        "keys": sorted(key.removeprefix(prefix) for key in entries),
        "leases": (bool(info.lease), bool(ttl.lease)),
        "info": _json_shape(json.loads(info.value)),
        "ttl": (ttl.value.isdigit(), len(ttl.value)),
    }


async def full_server(node: Tidb, others: int) -> Any:
    """Examine the response to a client while `others` sessions (the node's `max_connections`) are open."""
    async with AsyncExitStack() as exit_stack:
        for _ in range(others):
            # TiDB counts a session shortly after its login, but before its first statement.
            await exit_stack.enter_async_context(logged_in(node, "set @a = 1"))
        client = await exit_stack.enter_async_context(open_connection(node))
        return await client.read_packet(), await read_until_end(client)


async def graceful_shutdown(node: Tidb) -> Any:
    """Examine the effects of SIGTERM, in order, on an idle session and on a session in a transaction.

    COM_PING is excluded: TiDB up to 8.5.3 answers it. Later releases and the simulated server reject it.
    """
    async with logged_in(node) as idle, logged_in(node, "begin") as in_transaction, logged_in(node) as active:
        shutdown_task = asyncio.create_task(node.terminate())
        async with http_client(node.status_url) as client:

            async def has_noticed() -> bool:
                return (await client.get("/status")).status_code != 200

            await wait_until(has_noticed)
            status = (await client.get("/status")).status_code
        works = await active.query("set @a = 1")
        async with logged_in(node) as new_session:
            login = await new_session.query("set @a = 1")
        started_at = time.monotonic()
        idle_end = await read_until_end(idle)
        outlasted_half_wait = time.monotonic() - started_at > node.graceful_wait / 2
        accepted = await accepts_connections(node.port)
        works_after_wait = await in_transaction.query("set @a = 1")
        committed = await in_transaction.query("commit")
        final_end = await read_until_end(in_transaction)
        return {
            "status": status,
            "during the wait": (works, login),
            "idle": (idle_end, outlasted_half_wait),
            "accepts after the wait": accepted,
            "in a transaction": (works_after_wait, committed, final_end),
            "exit": await shutdown_task,
        }


def _json_shape(value: Any) -> Any:
    """Return the keys of a JSON value and the types of its leaves."""
    if isinstance(value, dict):
        return {key: _json_shape(item) for key, item in sorted(value.items())}
    return type(value).__name__

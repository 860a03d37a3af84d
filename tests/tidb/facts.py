"""What one TiDB server does, real or not, where Tidevoy relies on it. Each function asks one server."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from controlplane.etcd.client import EtcdClient
from sandbox.cluster import Cluster
from sandbox.tidb import Tidb
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, parse_greeting
from sandbox.tidb_sim.packets import Capability, Command, frame
from tests.tidb_sim_rig import CAPABILITIES, Raw

Fact = Callable[[Tidb], Awaitable[Any]]
_SECONDS = 10.0
_LOGIN = struct.Struct("<IIB23x")
_ZSTD = Capability(1 << 26)
"""CLIENT_ZSTD_COMPRESSION_ALGORITHM, which the stand-in does not offer."""


@asynccontextmanager
async def connected(node: Tidb) -> AsyncIterator[Raw]:
    """A connection that has sent nothing yet; cut at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def logged_in(node: Tidb, *statements: str) -> AsyncIterator[Raw]:
    """A session of root in which these statements have been executed."""
    async with connected(node) as client:
        assert (await client.login())[0] == 0x00
        for statement in statements:
            assert (await client.query(statement))[0] == 0x00
        yield client


async def until_end(client: Raw, seconds: float = _SECONDS) -> tuple[bytes, str]:
    """What comes until the connection ends, and how it ends: `FIN`, `RST`, or `open` when it does not."""
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
    """The first packet: all but version, connection id and salt."""
    async with connected(node) as client:
        sequence, payload = await client.packet()
    told = parse_greeting(payload)
    behind = payload[payload.index(0) + 1 :]
    version, _, release = told.version.partition("-TiDB-v")
    return {
        "sequence": sequence,
        "version": version,
        "says its release": bool(release),
        "capabilities": told.capabilities & ~_ZSTD,
        "collation and status": behind[15:18],
        "salt": (behind[4:12].isascii(), behind[12], len(behind[31:43]), behind[43]),
        "plugin": behind[44:],
    }


async def status_page(node: Tidb) -> Any:
    """`/status` and `/info` of the status port: keys and the kinds of their values."""
    async with httpx2.AsyncClient(trust_env=False, base_url=node.status) as client:
        status, info = await client.get("/status"), await client.get("/info")
        nowhere = await client.get("/nowhere")
    return {
        "status": (status.status_code, status.headers["content-type"], _shape(status.json())),
        "info": _shape(info.json()),
        "nowhere": nowhere.status_code,
    }


async def idle_session_that_is_killed(node: Tidb) -> Any:
    """It gets a FIN without a word."""
    async with logged_in(node) as killed, logged_in(node) as killer:
        ((number,),) = await killed.rows("select connection_id()")
        return await killer.query(f"kill {number}"), await until_end(killed)


async def busy_session_that_is_killed(node: Tidb) -> Any:
    """It gets no error either."""
    async with logged_in(node) as killed, logged_in(node) as killer:
        ((number,),) = await killed.rows("select connection_id()")
        killed.writer.write(frame(0, bytes((Command.QUERY,)) + b"select sleep(30)"))
        await _until_busy(killer, str(number))
        return await killer.query(f"kill {number}"), await until_end(killed)


async def session_that_is_not_there(node: Tidb) -> Any:
    """To kill it is no error."""
    async with logged_in(node) as killer:
        return [await killer.query(f"kill {how} 4242424242") for how in ("", "connection", "query")]


async def session_that_is_idle_for_too_long(node: Tidb) -> Any:
    """`wait_timeout`: a FIN without a word."""
    async with logged_in(node, "set session wait_timeout = 1") as client:
        begin = time.monotonic()
        end = await until_end(client)
        return end, 0.5 < time.monotonic() - begin < 3.0


async def login_that_never_comes(node: Tidb) -> Any:
    """For how long a server waits behind its greeting: longer than Tidevoy does."""
    async with connected(node) as client:
        await client.packet()
        return await until_end(client, 16.0)


async def logins_that_are_refused(node: Tidb) -> Any:
    """No such user, no such database, another protocol."""
    ends = []
    for user, database, capabilities in (
        (b"nobody", b"", CAPABILITIES),
        (b"root", b"nowhere", CAPABILITIES | Capability.CONNECT_WITH_DB),
        (b"root", b"", CAPABILITIES & ~Capability.PROTOCOL_41),
    ):
        async with connected(node) as client:
            await client.packet()
            named = database + b"\0" if database else b""
            head = _LOGIN.pack(capabilities, 1 << 24, 45) + user + b"\0\0"
            client.writer.write(frame(1, head + named + NATIVE_PASSWORD.encode() + b"\0"))
            ends.append(await until_end(client))
    return ends


async def commands(node: Tidb) -> Any:
    """The answers to commands that are rare, unknown, or about statements that are not there."""
    number = (99).to_bytes(4, "little")
    asked = {
        "ping": b"\x0e",
        "reset": b"\x1f",
        "unknown": b"\x77",
        "debug": b"\x0d",
        "multi statements off": b"\x1b\1\0",
        "create database": b"\x05x",
        "execute": b"\x17" + number + b"\0\1\0\0\0",
        "reset statement": b"\x1a" + number,
        "fetch": b"\x1c" + number + b"\1\0\0\0",
    }
    answers = {}
    for name, command in asked.items():
        async with logged_in(node) as client:
            client.writer.write(frame(0, command))
            answers[name] = await client.packet()
    return answers


async def statements(node: Tidb) -> Any:
    """The answers to statements without rows, in one session; of syntax errors only the code."""
    answers = {}
    async with logged_in(node) as client:
        for statement in (
            *("", ";", "/* nothing */", "begin", "commit", "start transaction", "rollback"),
            *("set autocommit = 0", "set autocommit = 1", "use nowhere", "select * from nowhere.t"),
            *("set nosuch = 1", "begin foo", "set @a = 1", "kill"),
        ):
            answer = await client.command(Command.QUERY, statement.encode())
            is_syntax = answer[:3] == b"\xff" + (1064).to_bytes(2, "little")
            answers[statement] = answer[:9] if is_syntax else answer
    return answers


async def states(node: Tidb) -> Any:
    """SHOW SESSION_STATES: what is told of a session that has a bit of everything, and the token's shape."""
    async with logged_in(node) as client:
        fresh, token = await client.states()
        await client.query("set @a = 1, @b = 'x'")
        await client.query("use mysql")
        await client.query("prepare s from 'select ? + 1'")
        number = await client.prepare(b"select ?, 'x'")
        await client.rows("select 1 union select 2")
        full, _ = await client.states()
        told = json.loads(token)
    own = ("sys-vars", "user-var-values", "user-var-types", "rs-group", "query-info")
    return {
        "fresh": {key: value for key, value in fresh.items() if key not in own},
        "full": {key: value for key, value in full.items() if key not in own},
        "variables": sorted(full["user-var-values"]) == sorted(full["user-var-types"]) == ["a", "b"],
        "settings": {name: full["sys-vars"][name] for name in ("autocommit", "character_set_client")},
        "number": number,
        "token": _shape(told),
    }


async def states_that_tell_nothing(node: Tidb) -> Any:
    """SET SESSION_STATES sets what they do not tell to nothing."""
    async with logged_in(node, "prepare s from 'select 1'") as client:
        first = await client.prepare(b"select 1")
        await client.states()
        set_ = await client.query("set session_states '{}'")
        left = await client.rows("select row_count(), found_rows(), last_insert_id()")
        return set_[0], left, first, await client.prepare(b"select 2")


async def registration(cluster: Cluster, node: Tidb) -> Any:
    """The keys in PD: their names, whether they have leases, and the shape of their values."""
    prefix = f"/topology/tidb/{node.address}"
    async with EtcdClient([cluster.pd_url]) as client:
        entries = (await client.range(prefix)).entries
    info, ttl = entries[f"{prefix}/info"], entries[f"{prefix}/ttl"]
    return {
        "keys": sorted(key.removeprefix(prefix) for key in entries),
        "leases": (bool(info.lease), bool(ttl.lease)),
        "info": _shape(json.loads(info.value)),
        "ttl": (ttl.value.isdigit(), len(ttl.value)),
    }


async def full_server(node: Tidb, others: int) -> Any:
    """`max_connections` is `others`, and so many sessions are there: what the next client gets."""
    held = []
    for _ in range(others):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        held.append(writer)
        assert (await Raw(reader, writer).login())[0] == 0x00
    try:
        async with connected(node) as client:
            return await client.packet(), await until_end(client)
    finally:
        for writer in held:
            writer.transport.abort()


async def graceful_end(node: Tidb) -> Any:
    """SIGTERM: in which order things end, for a session that is idle and one in a transaction.

    Not asked is COM_PING: until 8.5.3 TiDB answers it, and the stand-in refuses it as later releases do.
    """
    async with logged_in(node) as idle, logged_in(node, "begin") as open_, logged_in(node) as asking:
        ending = asyncio.create_task(node.terminate())
        async with httpx2.AsyncClient(trust_env=False, base_url=node.status) as client:
            async with asyncio.timeout(_SECONDS):
                while (code := (await client.get("/status")).status_code) == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        works = await asking.query("set @a = 1")
        async with logged_in(node) as late:
            login = await late.query("set @a = 1")
        begin = time.monotonic()
        waited = await until_end(idle)
        lasted = time.monotonic() - begin > node.graceful_wait / 2
        refused = False
        try:
            async with connected(node):
                pass
        except ConnectionRefusedError:
            refused = True
        still = await open_.query("set @a = 1")
        committed = await open_.query("commit")
        last = await until_end(open_)
        return {
            "status": code,
            "during the wait": (works, login),
            "idle": (waited, lasted),
            "then refused": refused,
            "in a transaction": (still, committed, last),
            "exit": await ending,
        }


async def _until_busy(client: Raw, number: str) -> None:
    async with asyncio.timeout(_SECONDS):
        while True:
            listed = await client.rows("select id, command from information_schema.processlist")
            if (number, "Query") in listed:
                return
            await asyncio.sleep(0.02)


def _shape(value: Any) -> Any:
    """A JSON value without what differs from server to server."""
    if isinstance(value, dict):
        return {key: _shape(one) for key, one in sorted(value.items())}
    return type(value).__name__

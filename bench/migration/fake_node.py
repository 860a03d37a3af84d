"""Stand-in nodes whose sessions can move, thousands of them in one process that does little else.

`python -m bench.migration.fake_node --port P --status S --key K`: each address of 127.0.0.0/8 is a node at port P.
They let root in, answer `select connection_id()` at once, and take part in moves as TiDB does: SHOW
SESSION_STATES, login with a session token, SET SESSION_STATES. All with the same key are one cluster. What a
proxy may not do is counted as a violation; `GET /` at port S tells of it, and of the sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import hmac
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, greeting, new_salt, parse_response
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    TYPE_JSON,
    BadSequence,
    Command,
    MalformedPacket,
    err,
    frame,
    frames,
    joined,
    ok,
    one_row,
    result_set,
)
from sandbox.tidb_sim.session_token import Signer, TokenRejected, check, issue

VERSION = "8.0.11-TiDB-v8.5.3"
_TOKEN_PLUGIN = "tidb_session_token"
_USER = "root"
_ASKED = b"select connection_id()"
_EXPORT = b"SHOW SESSION_STATES"
_PREPARE = b"SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'"
_RESTORE = b"SET SESSION_STATES '"
_MOST_TOLD = 20


def signer(key: bytes) -> Signer:
    """All nodes with the same key believe each other's tokens."""

    def sign(content: bytes) -> bytes:
        return hmac.digest(key, content, hashlib.sha256)

    return Signer(sign, lambda content, signature: hmac.compare_digest(sign(content), signature))


@dataclass
class House:
    """All nodes of this process. `sessions`, `logins`, `arrivals`: by the node's address.

    `emptied`: when the last session left a node (time.monotonic).
    """

    signer: Signer
    sessions: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    arrivals: Counter[str] = field(default_factory=Counter)
    emptied: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    connections: int = 0

    def came(self, node: str, *, moved: bool) -> None:
        """A session is there now."""
        self.sessions[node] += 1
        (self.arrivals if moved else self.logins)[node] += 1
        self.emptied.pop(node, None)

    def left(self, node: str) -> None:
        """One has gone."""
        self.sessions[node] -= 1
        if not self.sessions[node]:
            self.emptied[node] = time.monotonic()

    def report(self) -> bytes:
        """All of it as JSON."""
        counts = {"sessions": self.sessions, "logins": self.logins, "arrivals": self.arrivals}
        told = counts | {"emptied": self.emptied, "violations": self.violations[:_MOST_TOLD]}
        return json.dumps(told).encode()


class Violation(Exception):
    """What no proxy may do; it ends the connection."""


class NodeSession(asyncio.Protocol):
    """One connection. `who` is what a session is known by wherever it is; it is all that its states hold."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._data = bytearray()
        self._take: Callable[[bytes], None] = self._login
        self._in = False
        self._who = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        host, port = transport.get_extra_info("sockname")
        self._node = f"{host}:{port}"
        self._house.connections += 1
        self._number = self._house.connections
        transport.write(frame(0, greeting(VERSION, self._number, new_salt())))

    def connection_lost(self, error: Exception | None) -> None:
        if self._in:
            self._house.left(self._node)

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while found := joined(self._data, numbered=self._take != self._login):
                payload, size = found
                del self._data[:size]
                self._take(payload)
        except (Violation, BadSequence, MalformedPacket, ValueError) as problem:
            if len(self._house.violations) < _MOST_TOLD:
                self._house.violations.append(f"{self._node}: {problem!r}")
            self._transport.abort()

    def _login(self, payload: bytes) -> None:
        login = parse_response(payload)
        if login.user != _USER:
            raise Violation(f"a login of {login.user!r}")
        if moved := login.plugin == _TOKEN_PLUGIN:
            try:
                check(self._house.signer, login.auth, login.user, time.time_ns())
            except TokenRejected as reason:
                raise Violation(f"a token that is none: {reason}") from reason
        elif login.plugin != NATIVE_PASSWORD or login.auth:
            raise Violation(f"a login with {login.plugin} and {len(login.auth)} bytes")
        self._take = self._entering if moved else self._command
        self._in = True
        self._who = f"{self._node}/{self._number}"
        self._house.came(self._node, moved=moved)
        self._transport.write(frame(2, ok(AUTOCOMMIT)))

    def _entering(self, payload: bytes) -> None:
        """Behind a login by token nothing may come before the states."""
        if payload == bytes((Command.QUERY,)) + _PREPARE:
            self._answer([ok(AUTOCOMMIT)])
        elif payload.startswith(bytes((Command.QUERY,)) + _RESTORE):
            self._restore(payload[1:])
            self._take = self._command
        elif payload != bytes((Command.QUIT,)):
            raise Violation(f"{payload[:40]!r} before the states of a session that has moved")

    def _command(self, payload: bytes) -> None:
        match payload[0], payload[1:]:
            case Command.PING, b"":
                self._answer([ok(AUTOCOMMIT)])
            case Command.QUIT, b"":
                self._transport.close()
            case Command.QUERY, statement if statement == _ASKED:
                name = _ASKED.removeprefix(b"select ").decode()
                self._answer(one_row([(name, self._number)], AUTOCOMMIT, deprecate_eof=False))
            case Command.QUERY, statement if statement == _EXPORT:
                self._answer(self._states())
            case Command.QUERY, statement if statement.startswith(_RESTORE):
                # What the export may have changed is put back: the session stays.
                self._answer([ok(AUTOCOMMIT)])
            case _:
                self._answer([err(1105, "this stand-in knows no such statement", "HY000")])
                raise Violation(f"command {payload[:60]!r}")

    def _states(self) -> list[bytes]:
        states = {"user-var-values": {"who": self._who.encode().hex()}, "user-var-types": {"who": "VARCHAR"}}
        token = issue(self._house.signer, _USER, time.time_ns())
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        row = [json.dumps(one).encode() for one in (states, token)]
        return result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False)

    def _restore(self, statement: bytes) -> None:
        """What came is what another node has exported, byte for byte."""
        literal = statement.removeprefix(_RESTORE)
        if not literal.endswith(b"'"):
            raise Violation("a literal without an end")
        stored = json.loads(literal[:-1].replace(b"\\\\", b"\\").replace(b"\\'", b"'"))
        self._who = bytes.fromhex(stored["user-var-values"]["who"]).decode()
        self._answer([ok(AUTOCOMMIT)])

    def _answer(self, payloads: list[bytes]) -> None:
        self._transport.write(frames(1, payloads))


async def _report(house: House, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        body = house.report()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
    except (OSError, EOFError):
        pass
    finally:
        writer.close()


async def serve(port: int, status: int, key: bytes) -> None:
    """Until the process is ended."""
    house = House(signer(key))
    loop = asyncio.get_running_loop()
    sql = await loop.create_server(lambda: NodeSession(house), "0.0.0.0", port, backlog=4096)
    told = await asyncio.start_server(
        lambda reader, writer: _report(house, reader, writer), "127.0.0.1", status
    )
    gc.disable()  # nothing here is a cycle, and its pauses would be taken for the proxy's
    async with sql, told:
        await asyncio.gather(sql.serve_forever(), told.serve_forever())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration.fake_node", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--key", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve(options.port, options.status, options.key.encode()))
    except OSError as error:
        sys.exit(f"moves_node: {error}")


if __name__ == "__main__":
    main()

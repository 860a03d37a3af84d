"""Fake nodes whose sessions can migrate, with thousands of sessions in one process.

In `python -m bench.migration.fake_node --port P --status S --key K`, each address of 127.0.0.0/8 is a node at
port P. The nodes admit root, answer `select connection_id()` at once, and migrate sessions as TiDB does: SHOW
SESSION_STATES, login with a session token, SET SESSION_STATES. Nodes with the same key accept each other's
tokens. Any GET at port S returns the sessions and the proxy's protocol violations.
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

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD, build_greeting, new_salt, parse_handshake_response
from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    TYPE_JSON,
    BadSequence,
    MalformedPacket,
    MySqlCommand,
    err,
    frame,
    frames,
    ok,
    parse_payload,
    result_set,
    single_row_result,
)
from sandbox.tidb_sim.session_token import Signer, TokenRejected, issue_token, verify_token

VERSION = "8.0.11-TiDB-v8.5.3"
_TOKEN_PLUGIN = "tidb_session_token"
_USER = "root"
_CONNECTION_ID_STATEMENT = b"select connection_id()"
_EXPORT_STATEMENT = b"SHOW SESSION_STATES"
_BEFORE_RESTORE_STATEMENT = b"SET @@session.sql_mode='', @@session.character_set_client='utf8mb4'"
_RESTORE_PREFIX = b"SET SESSION_STATES '"
_MAX_VIOLATIONS = 20


def make_signer(key: bytes) -> Signer:
    """Return a token signer; nodes with the same key accept each other's tokens."""

    def sign(content: bytes) -> bytes:
        return hmac.digest(key, content, hashlib.sha256)

    return Signer(sign, lambda content, signature: hmac.compare_digest(sign(content), signature))


@dataclass
class SharedNodeState:
    """The state of all nodes of this process, by node address.

    `emptied_at`: when the last session left a node (time.monotonic), for nodes without sessions.
    """

    signer: Signer
    sessions: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    emptied_at: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    connections: int = 0

    def session_opened(self, node: str, *, is_by_token: bool) -> None:
        """Count a session that has logged in or migrated to the node."""
        self.sessions[node] += 1
        self.logins[node] += not is_by_token
        self.emptied_at.pop(node, None)

    def session_closed(self, node: str) -> None:
        """Count a session that has left the node."""
        self.sessions[node] -= 1
        if not self.sessions[node]:
            self.emptied_at[node] = time.monotonic()

    def report_as_json(self) -> bytes:
        """Return this state as JSON, with the totals that TiDB's `GET /status` has."""
        counts = {"sessions": self.sessions, "logins": self.logins}
        content = counts | {"emptied": self.emptied_at, "violations": self.violations[:_MAX_VIOLATIONS]}
        status = {"connections": self.sessions.total(), "version": VERSION, "git_hash": "fake"}
        return json.dumps(content | status).encode()


class ProtocolViolation(Exception):
    """The proxy violated the protocol. The node closes the connection."""


class NodeSession(asyncio.Protocol):
    """One connection. The session states contain only `_identity`, which thus survives migrations."""

    def __init__(self, state: SharedNodeState) -> None:
        self._state = state
        self._data = bytearray()
        self._handle_packet: Callable[[bytes], None] = self._handle_login
        self._is_logged_in = False
        self._identity = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        host, port = transport.get_extra_info("sockname")
        self._node = f"{host}:{port}"
        self._state.connections += 1
        self._number = self._state.connections
        transport.write(frame(0, build_greeting(VERSION, self._number, new_salt())))

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_logged_in:
            self._state.session_closed(self._node)

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while packet := parse_payload(
                self._data, check_sequence=self._handle_packet != self._handle_login
            ):
                payload, size = packet
                del self._data[:size]
                self._handle_packet(payload)
        except (ProtocolViolation, BadSequence, MalformedPacket, ValueError) as problem:
            if len(self._state.violations) < _MAX_VIOLATIONS:
                self._state.violations.append(f"{self._node}: {problem!r}")
            self._transport.abort()

    def _handle_login(self, payload: bytes) -> None:
        login = parse_handshake_response(payload)
        if login.user != _USER:
            raise ProtocolViolation(f"a login of {login.user!r}")
        if is_by_token := login.plugin == _TOKEN_PLUGIN:
            try:
                verify_token(self._state.signer, login.auth_response, login.user, time.time_ns())
            except TokenRejected as reason:
                raise ProtocolViolation(f"an invalid token: {reason}") from reason
        elif login.plugin != NATIVE_PASSWORD or login.auth_response:
            raise ProtocolViolation(f"a login with {login.plugin} and {len(login.auth_response)} bytes")
        self._handle_packet = self._handle_before_restore if is_by_token else self._handle_command
        self._is_logged_in = True
        self._identity = f"{self._node}/{self._number}"
        self._state.session_opened(self._node, is_by_token=is_by_token)
        self._transport.write(frame(2, ok(AUTOCOMMIT)))

    def _handle_before_restore(self, payload: bytes) -> None:
        """Handle a command after a token login, before the states are restored."""
        if payload == bytes((MySqlCommand.QUERY,)) + _BEFORE_RESTORE_STATEMENT:
            self._send_payloads([ok(AUTOCOMMIT)])
        elif payload.startswith(bytes((MySqlCommand.QUERY,)) + _RESTORE_PREFIX):
            self._restore_states(payload[1:])
            self._handle_packet = self._handle_command
        elif payload != bytes((MySqlCommand.QUIT,)):
            raise ProtocolViolation(f"{payload[:40]!r} before the states of a migrated session")

    def _handle_command(self, payload: bytes) -> None:
        match payload[0], payload[1:]:
            case MySqlCommand.PING, b"":
                self._send_payloads([ok(AUTOCOMMIT)])
            case MySqlCommand.QUIT, b"":
                self._transport.close()
            case MySqlCommand.QUERY, statement if statement == _CONNECTION_ID_STATEMENT:
                name = _CONNECTION_ID_STATEMENT.removeprefix(b"select ").decode()
                self._send_payloads(
                    single_row_result([(name, self._number)], AUTOCOMMIT, deprecate_eof=False)
                )
            case MySqlCommand.QUERY, statement if statement == _EXPORT_STATEMENT:
                self._send_payloads(self._export_states())
            case MySqlCommand.QUERY, statement if statement.startswith((_RESTORE_PREFIX, b"SET NAMES ")):
                # A restore undoes an export of a session that stays here. PyMySQL sends SET NAMES.
                self._send_payloads([ok(AUTOCOMMIT)])
            case _:
                self._send_payloads([err(1105, "this fake node does not know the statement", "HY000")])
                raise ProtocolViolation(f"command {payload[:60]!r}")

    def _export_states(self) -> list[bytes]:
        states = {
            "user-var-values": {"who": self._identity.encode().hex()},
            "user-var-types": {"who": "VARCHAR"},
        }
        token = issue_token(self._state.signer, _USER, time.time_ns())
        columns = [("Session_states", TYPE_JSON), ("Session_token", TYPE_JSON)]
        row = [json.dumps(value).encode() for value in (states, token)]
        return result_set(columns, [row], AUTOCOMMIT, deprecate_eof=False)

    def _restore_states(self, statement: bytes) -> None:
        literal = statement.removeprefix(_RESTORE_PREFIX)
        if not literal.endswith(b"'"):
            raise ProtocolViolation("an unterminated literal")
        states = json.loads(literal[:-1].replace(b"\\\\", b"\\").replace(b"\\'", b"'"))
        self._identity = bytes.fromhex(states["user-var-values"]["who"]).decode()
        self._send_payloads([ok(AUTOCOMMIT)])

    def _send_payloads(self, payloads: list[bytes]) -> None:
        self._transport.write(frames(1, payloads))


async def _serve_report(
    state: SharedNodeState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        body = state.report_as_json()
        headers = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(headers.encode() + body)
        await writer.drain()
    except (OSError, EOFError):
        pass
    finally:
        writer.close()


async def serve(port: int, status: int, key: bytes) -> None:
    """Serve until the process ends."""
    state = SharedNodeState(make_signer(key))
    loop = asyncio.get_running_loop()
    sql = await loop.create_server(lambda: NodeSession(state), "0.0.0.0", port, backlog=4096)
    report_server = await asyncio.start_server(
        lambda reader, writer: _serve_report(state, reader, writer), "0.0.0.0", status
    )
    gc.disable()  # its pauses would be attributed to the proxy; there are no reference cycles
    async with sql, report_server:
        await asyncio.gather(sql.serve_forever(), report_server.serve_forever())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.migration.fake_node", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--status", type=int, required=True)
    parser.add_argument("--key", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve(options.port, options.status, options.key.encode()))
    except OSError as error:
        sys.exit(f"fake_node: {error}")


if __name__ == "__main__":
    main()

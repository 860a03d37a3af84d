"""One client connection: greeting, login, then a relay. COM_CHANGE_USER starts a new login.

The order of the steps and the errors are TiDB's (pingcap/tidb pkg/server/conn.go).
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field, replace

from controlplane.address import join
from sandbox.tidb_sim.accounts import Account, AuthPlugin
from sandbox.tidb_sim.authentication import Authenticator
from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.greeting import (
    OFFERED_CAPABILITIES,
    ClientLogin,
    LoginRefused,
    build_greeting,
    new_salt,
    parse_capabilities,
    parse_change_user,
    parse_handshake_response,
)
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError, BackendUnavailable
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.packets import AUTOCOMMIT, BadSequence, Capability, MalformedPacket, err, ok
from sandbox.tidb_sim.proxy_header import read_client_address
from sandbox.tidb_sim.relay import Relay
from sandbox.tidb_sim.request_handler import RequestHandler
from sandbox.tidb_sim.session_migration import SessionMigration
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream, PacketTooLarge
from sandbox.tidb_sim.tls import SqlTlsFiles, TlsHandshakeFailed

_INSECURE_TRANSPORT_MESSAGE = (
    "Connections using insecure transport are prohibited while --require_secure_transport=ON."
)


@dataclass(frozen=True)
class SessionRules:
    """Settings that apply to all sessions of a server. If `max_connections` is 0, there is no limit.

    `backend`: address of MariaDB, the path of a socket (with a slash) or `host:port`.
    `requires_proxy_header`: as TiDB with `proxy-protocol.networks = "*"` and `fallbackable = false`.
    """

    backend: str
    max_connections: int = 0
    requires_proxy_header: bool = False
    tls: SqlTlsFiles | None = None
    require_secure_transport: bool = False
    migration: MigrationRules = field(default_factory=MigrationRules)


class SimSession:
    """One client connection, from the greeting to the close."""

    def __init__(
        self, node: SimNode, rules: SessionRules, stream: PacketStream, tls: ssl.SSLContext | None = None
    ) -> None:
        self._node, self._rules, self._stream, self._tls = node, rules, stream, tls
        self._knows_capabilities = False
        """Whether the client's capabilities are known. If not, an ERR has no SQLSTATE."""
        self._salt = new_salt()
        self._relay: Relay | None = None
        self.connection_id = 0
        self._peer_ip, self._peer = _peer_address(stream)

    @property
    def is_busy(self) -> bool:
        """Whether a graceful shutdown waits for this session."""
        return self._relay is not None and self._relay.is_busy

    def kill(self) -> None:
        """Close the session, as the last phase of a shutdown does. `run` then returns soon."""
        if self._relay is not None:
            self._relay.kill()
        self._stream.abort()

    def abort(self) -> None:
        """Reset the session, as a crash does. `run` then returns soon."""
        if self._relay is not None:
            self._relay.abort()
        self._stream.abort()

    async def run(self) -> None:
        """Serve the client until one side closes. Raises only CancelledError."""
        backend: BackendConnection | None = None
        try:
            # Like TiDB, check the connection limit before sending the greeting (`writeInitialHandshake` in
            # pkg/server/conn.go).
            self._check_connection_limit()
            # The client gets the id of MariaDB's connection, so that KILL hits the right session.
            backend = await BackendConnection.connect(self._rules.backend)
            await self._serve(backend)
        except BackendUnavailable:
            pass  # TiDB without its storage closes a connection without an error packet.
        except BackendError as error:
            self._stream.send(error.payload)
        except LoginRefused as refusal:
            if refusal.violation:
                self._node.record_violation(self._peer, refusal.violation)
            self._send_error(refusal.code, refusal.message, refusal.state)
        except (BadSequence, PacketTooLarge, MalformedPacket) as error:
            self._report_protocol_error(error)
        except (ConnectionClosed, TlsHandshakeFailed):
            pass  # One side closed the connection or rejected the TLS handshake.
        finally:
            self._stream.transport.close()
            if backend is not None:
                await backend.close()
            await self._stream.close()

    async def _serve(self, backend: BackendConnection) -> None:
        node, stream = self._node, self._stream
        self.connection_id = backend.greeting.connection_id
        offered = OFFERED_CAPABILITIES | Capability.SSL if self._tls is not None else OFFERED_CAPABILITIES
        stream.send(build_greeting(node.server_version, self.connection_id, self._salt, offered=offered))
        login = await self._read_login()
        login = replace(login, capabilities=login.capabilities & (offered | Capability.LENENC_AUTH))
        self._knows_capabilities = True
        # Like TiDB, check the limit again after the client's response. Other clients count only after their
        # login (`registerConn` in pkg/server/server.go), and may have reached the limit meanwhile.
        try:
            self._check_connection_limit()
        except LoginRefused as refusal:
            self._send_error(refusal.code, refusal.message, refusal.state)
            raise  # TiDB sends this error twice, in `handshake` and in `onConn`.
        authentication = Authenticator(stream, self._salt, self._rules.migration)
        await backend.login(login.capabilities, login.collation)
        accounts = await backend.load_accounts(login.user)
        account = await authentication.authenticate(login, accounts, self._peer_ip)
        if login.database:
            await backend.use_database(login.database)
        node.connections += 1
        try:
            stream.send(ok(AUTOCOMMIT))
            if login.capabilities & Capability.COMPRESS:
                stream.start_compression()
            by_token = login.plugin == AuthPlugin.SESSION_TOKEN
            while True:
                requests = self._create_request_handler(login, account, backend, by_token=by_token)
                self._relay = Relay(node, requests, stream, backend)
                request = await self._relay.run()
                if request is None:
                    return
                self._relay, by_token = None, False
                stream.sequence = 1
                login = parse_change_user(request, login)
                accounts = await backend.load_accounts(login.user)
                account = await authentication.change_user(login, accounts, self._peer_ip)
                await backend.change_user(login.database, login.collation)
                stream.send(ok(AUTOCOMMIT))
        finally:
            node.connections -= 1

    async def _read_login(self) -> ClientLogin:
        if self._rules.requires_proxy_header:
            peer = await read_client_address(self._stream)
            if peer is not None:
                self._peer, self._peer_ip = peer, peer.rpartition(":")[0].strip("[]")
        payload = await self._stream.read()
        if parse_capabilities(payload) & Capability.SSL:
            # TiDB without TLS parses the SSLRequest as a handshake response and rejects it as too short.
            if self._tls is not None:
                await self._stream.start_tls(self._tls)
                payload = await self._stream.read()
        elif self._rules.require_secure_transport:
            raise LoginRefused(3159, _INSECURE_TRANSPORT_MESSAGE, "HY000")
        return parse_handshake_response(payload)

    def _check_connection_limit(self) -> None:
        if 0 < self._rules.max_connections <= self._node.connections:
            raise LoginRefused(1040, "Too many connections", "08004")

    def _create_request_handler(
        self, login: ClientLogin, account: Account, backend: BackendConnection, *, by_token: bool
    ) -> RequestHandler:
        tls = self._stream.transport.get_extra_info("ssl_object")
        version, cipher = (tls.version(), tls.cipher()[0]) if tls is not None else ("", "")
        client = SqlClientInfo(self._peer, login.user, account.host, version, cipher)
        deprecate_eof = bool(login.capabilities & Capability.DEPRECATE_EOF)
        migration = SessionMigration(
            self._node,
            client,
            backend,
            self._rules.migration,
            database=login.database,
            by_token=by_token,
            deprecate_eof=deprecate_eof,
        )
        return RequestHandler(self._node, client, migration, deprecate_eof=deprecate_eof)

    def _send_error(self, code: int, message: str, state: str) -> None:
        self._stream.send(err(code, message, state if self._knows_capabilities else None))

    def _report_protocol_error(self, error: Exception) -> None:
        """Report a protocol error. The client caused it, since MariaDB's packets are always valid."""
        if isinstance(error, PacketTooLarge):
            self._stream.sequence = (self._stream.sequence + 1) & 0xFF
            self._send_error(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")
            return
        self._node.record_violation(self._peer, str(error))
        if isinstance(error, BadSequence):
            self._stream.sequence = (error.received + 1) & 0xFF
            self._send_error(8052, str(error), "HY000")
        else:
            self._send_error(1105, "malform packet error", "HY000")


def _peer_address(stream: PacketStream) -> tuple[str, str]:
    """Return the peer's IP address and `host:port`. An IPv4-mapped IPv6 address becomes IPv4."""
    name = stream.transport.get_extra_info("peername")
    if not name:
        return "", ""  # The peer has already disconnected.
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    text = str(mapped or address)
    return text, join(text, name[1])

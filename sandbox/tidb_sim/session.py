"""One client connection: greeting, login, then a relay; once more from the login after COM_CHANGE_USER.

The order and the errors are TiDB's (pingcap/tidb pkg/server/conn.go).
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field, replace

from controlplane.address import join
from sandbox.tidb_sim.accounts import Account, Plugin
from sandbox.tidb_sim.authentication import OLD_PROTOCOL, Authentication, BadToken, Refused
from sandbox.tidb_sim.builtin_queries import Client
from sandbox.tidb_sim.greeting import (
    OFFERED,
    Login,
    OldProtocol,
    greeting,
    new_salt,
    parse_change_user,
    parse_response,
    requested,
)
from sandbox.tidb_sim.mariadb_backend import Backing, BackingAddress, BackingRefused, BackingUnavailable
from sandbox.tidb_sim.migration_rules import MoveRules
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import AUTOCOMMIT, BadSequence, Capability, MalformedPacket, err, ok
from sandbox.tidb_sim.proxy_header import InvalidHeader, MissingHeader, ProxyProtocol
from sandbox.tidb_sim.relay import Relay
from sandbox.tidb_sim.request_handler import Requests
from sandbox.tidb_sim.session_migration import Movement
from sandbox.tidb_sim.stream import ConnectionClosed, PacketStream, PacketTooLarge
from sandbox.tidb_sim.tls import SqlTls, TlsFailed

_INSECURE = "Connections using insecure transport are prohibited while --require_secure_transport=ON."


@dataclass(frozen=True)
class SessionRules:
    """What is the same for all sessions of a stand-in. `max_connections` 0 = no limit.

    `default_plugin` is TiDB's `default_authentication_plugin`: what the greeting names.
    """

    backing: BackingAddress
    max_connections: int = 0
    proxy_protocol: ProxyProtocol = field(default_factory=ProxyProtocol)
    tls: SqlTls | None = None
    require_secure_transport: bool = False
    default_plugin: str = Plugin.NATIVE
    moves: MoveRules = field(default_factory=MoveRules)


class Session:
    """One client connection, from its first byte to its last."""

    def __init__(
        self, node: Node, rules: SessionRules, stream: PacketStream, tls: ssl.SSLContext | None = None
    ) -> None:
        self._node, self._rules, self._stream, self._tls = node, rules, stream, tls
        self._known = False
        """Whether the client's capabilities are: before that no ERR has an SQLSTATE."""
        self._salt = new_salt()
        self._relay: Relay | None = None
        self.connection_id = 0
        self._peer_ip, self._peer = _peer_of(stream)

    @property
    def busy(self) -> bool:
        """Whether a graceful shutdown waits for it."""
        return self._relay is not None and self._relay.busy

    def kill(self) -> None:
        """End it now, as the last step of a shutdown does; `run` returns soon."""
        if self._relay is not None:
            self._relay.kill()
        self._stream.abort()

    def abort(self) -> None:
        """End it now, as a crash does; `run` returns soon."""
        if self._relay is not None:
            self._relay.abort()
        self._stream.abort()

    async def run(self) -> None:
        """Serve the client until one side closes. Raises nothing but cancellation."""
        backing: Backing | None = None
        try:
            # TiDB opens a session before it sends the greeting (`writeInitialHandshake` in
            # pkg/server/conn.go), and this checks the limit.
            self._check_limit()
            # MariaDB's connection id becomes the client's, so that KILL hits the right session.
            backing = await Backing.connect(self._rules.backing)
            await self._serve(backing)
        except BackingUnavailable:
            pass  # TiDB without its storage closes a connection without a word
        except BackingRefused as refusal:
            self._stream.send(refusal.payload)
        except BadToken as refusal:
            self._node.violation(self._peer, f"a login by token: {refusal.reason}")
            self._refuse(refusal.code, refusal.message, refusal.state)
        except Refused as refusal:
            self._refuse(refusal.code, refusal.message, refusal.state)
        except (BadSequence, PacketTooLarge, MalformedPacket) as error:
            self._answer_nonsense(error)
        except (ConnectionClosed, TlsFailed):
            pass  # one of the two ends went away
        finally:
            self._stream.transport.close()
            if backing is not None:
                await backing.close()
            await self._stream.close()

    async def _serve(self, backing: Backing) -> None:
        node, stream = self._node, self._stream
        self.connection_id = backing.greeting.connection_id
        offered = OFFERED | Capability.SSL if self._tls is not None else OFFERED
        plugin = self._rules.default_plugin
        stream.send(
            greeting(node.server_version, self.connection_id, self._salt, offered=offered, plugin=plugin)
        )
        login = await self._read_login()
        login = replace(login, capabilities=login.capabilities & (offered | Capability.LENENC_AUTH))
        self._known = True
        # For the client's response a session is opened again. Other clients, which count only from the end of
        # their login (`registerConn` in pkg/server/server.go), may have reached the limit meanwhile.
        try:
            self._check_limit()
        except Refused as refusal:
            self._refuse(refusal.code, refusal.message, refusal.state)
            raise  # both `handshake` and `onConn` send it
        authentication = Authentication(stream, self._salt, plugin, self._rules.moves)
        await backing.login(login.capabilities, login.collation)
        account = await authentication.login(login, await backing.accounts(login.user), self._peer_ip)
        if login.database:
            await backing.use(login.database)
        node.connections += 1
        try:
            stream.send(ok(AUTOCOMMIT))
            if login.capabilities & Capability.COMPRESS:
                stream.compress()
            by_token = login.plugin == Plugin.SESSION_TOKEN
            while True:
                requests = self._requests(login, account, backing, by_token=by_token)
                self._relay = Relay(node, requests, stream, backing)
                request = await self._relay.run()
                if request is None:
                    return
                self._relay, by_token = None, False
                stream.sequence = 1
                login = parse_change_user(request, login)
                accounts = await backing.accounts(login.user)
                account = await authentication.change_user(login, accounts, self._peer_ip)
                await backing.change_user(login.database, login.collation)
                stream.send(ok(AUTOCOMMIT))
        finally:
            node.connections -= 1

    async def _read_login(self) -> Login:
        if self._rules.proxy_protocol.trusts(self._peer_ip):
            try:
                peer = await self._rules.proxy_protocol.read(self._stream)
            except MissingHeader:
                raise Refused(1105, "PROXY protocol header is required", "HY000") from None
            except InvalidHeader:
                raise ConnectionClosed from None
            if peer is not None:
                self._peer, self._peer_ip = peer, peer.rpartition(":")[0].strip("[]")
        try:
            payload = await self._stream.read()
            if requested(payload) & Capability.SSL:
                # Without TLS this packet is taken for a whole response, which an SSLRequest is not.
                if self._tls is not None:
                    await self._stream.start_tls(self._tls)
                    payload = await self._stream.read()
            elif self._rules.require_secure_transport:
                raise Refused(3159, _INSECURE, "HY000")
            return parse_response(payload)
        except OldProtocol:
            raise Refused(1251, OLD_PROTOCOL, "08004") from None

    def _check_limit(self) -> None:
        if 0 < self._rules.max_connections <= self._node.connections:
            raise Refused(1040, "Too many connections", "08004")

    def _client(self, login: Login, account: Account) -> Client:
        tls = self._stream.transport.get_extra_info("ssl_object")
        version, cipher = (tls.version(), tls.cipher()[0]) if tls is not None else ("", "")
        return Client(self._peer, login.user, account.host, version, cipher)

    def _requests(self, login: Login, account: Account, backing: Backing, *, by_token: bool) -> Requests:
        who, deprecate_eof = self._client(login, account), bool(login.capabilities & Capability.DEPRECATE_EOF)
        movement = Movement(
            self._node,
            who,
            backing,
            self._rules.moves,
            database=login.database,
            by_token=by_token,
            deprecate_eof=deprecate_eof,
        )
        return Requests(self._node, who, movement, deprecate_eof=deprecate_eof)

    def _refuse(self, code: int, message: str, state: str) -> None:
        self._stream.send(err(code, message, state if self._known else None))

    def _answer_nonsense(self, error: Exception) -> None:
        """The login broke the protocol. MariaDB's sequence numbers are right, so it was the client."""
        if isinstance(error, BadSequence):
            self._node.violation(self._peer, str(error))
            self._stream.sequence = (error.got + 1) & 0xFF
            self._refuse(8052, str(error), "HY000")
        elif isinstance(error, PacketTooLarge):
            self._stream.sequence = (self._stream.sequence + 1) & 0xFF
            self._refuse(1153, "Got a packet bigger than 'max_allowed_packet' bytes", "08S01")
        else:
            self._node.violation(self._peer, str(error))
            self._refuse(1105, "malform packet error", "HY000")


def _peer_of(stream: PacketStream) -> tuple[str, str]:
    """The peer's IP address and its `host:port`; an IPv4 address is one, even on an IPv6 socket."""
    name = stream.transport.get_extra_info("peername")
    if not name:
        return "", ""  # it has gone already
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    text = str(mapped or address)
    return text, join(text, name[1])

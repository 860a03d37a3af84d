"""One client connection: greeting, login, then a relay; once more from the login after COM_CHANGE_USER.

The order and the errors are TiDB's (pingcap/tidb pkg/server/conn.go).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from controlplane.address import join
from sandbox.tidb_sim.accounts import matching
from sandbox.tidb_sim.backing import Backing, BackingAddress, BackingRefused, BackingUnavailable
from sandbox.tidb_sim.greeting import (
    NATIVE_PASSWORD,
    OFFERED,
    Login,
    OldProtocol,
    greeting,
    new_salt,
    parse_change_user,
    parse_response,
)
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, MalformedPacket, err, ok
from sandbox.tidb_sim.proxy_header import InvalidHeader, MissingHeader, ProxyProtocol
from sandbox.tidb_sim.relay import Relay
from sandbox.tidb_sim.stream import BadSequence, ConnectionClosed, PacketStream, PacketTooLarge

_OLD_PROTOCOL = (
    "Client does not support authentication protocol requested by server; consider upgrading MySQL client"
)


@dataclass(frozen=True)
class SessionRules:
    """What is the same for all sessions of a stand-in. `max_connections` 0 = no limit."""

    backing: BackingAddress
    max_connections: int = 0
    proxy_protocol: ProxyProtocol = field(default_factory=ProxyProtocol)


class _Refused(Exception):
    """The client gets this ERR and is closed."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        super().__init__(payload)


class Session:
    """One client connection, from its first byte to its last."""

    def __init__(self, node: Node, rules: SessionRules, stream: PacketStream) -> None:
        self._node, self._rules, self._stream = node, rules, stream
        self._salt = new_salt()
        self._relay: Relay | None = None
        self.connection_id = 0
        self._peer_ip, self._peer = _peer_of(stream)

    @property
    def busy(self) -> bool:
        """Whether a graceful shutdown waits for it."""
        return self._relay is not None and self._relay.busy

    def abort(self) -> None:
        """End it now; `run` returns soon."""
        if self._relay is not None:
            self._relay.abort()
        self._stream.abort()

    async def run(self) -> None:
        """Serve the client until one side closes. Raises nothing but cancellation."""
        backing: Backing | None = None
        try:
            if 0 < self._rules.max_connections <= self._node.connections:
                raise _Refused(err(1040, "Too many connections", None))
            # MariaDB's connection id becomes the client's, so that KILL hits the right session.
            backing = await Backing.connect(self._rules.backing)
            await self._serve(backing)
        except BackingUnavailable:
            pass  # TiDB without its storage closes a connection without a word
        except (_Refused, BackingRefused) as refusal:
            self._stream.send(refusal.payload)
        except (BadSequence, PacketTooLarge, MalformedPacket) as error:
            self._answer_nonsense(error)
        except ConnectionClosed:
            pass  # one of the two ends went away
        finally:
            self._stream.transport.close()
            if backing is not None:
                await backing.close()
            await self._stream.close()

    async def _serve(self, backing: Backing) -> None:
        node, stream = self._node, self._stream
        self.connection_id = backing.greeting.connection_id
        stream.send(greeting(node.server_version, backing.greeting.connection_id, self._salt))
        login = await self._read_login()
        await backing.login(login.capabilities & OFFERED, login.collation)
        await self._authenticate(login, backing)
        if login.database and login.capabilities & Capability.CONNECT_WITH_DB:
            await backing.use(login.database)
        node.connections += 1
        try:
            while True:
                stream.send(ok(AUTOCOMMIT))
                self._relay = Relay(node, login, self._peer, stream, backing.stream)
                request = await self._relay.run()
                if request is None:
                    return
                self._relay = None
                stream.sequence = 1
                login = parse_change_user(request, login)
                await self._authenticate(login, backing)
                await backing.change_user(login.database, login.collation)
        finally:
            node.connections -= 1

    async def _read_login(self) -> Login:
        if self._rules.proxy_protocol.trusts(self._peer_ip):
            try:
                peer = await self._rules.proxy_protocol.read(self._stream)
            except MissingHeader:
                raise _Refused(err(1105, "PROXY protocol header is required", None)) from None
            except InvalidHeader:
                raise ConnectionClosed from None
            if peer is not None:
                self._peer, self._peer_ip = peer, peer.rpartition(":")[0].strip("[]")
        try:
            return parse_response(await self._stream.read())
        except OldProtocol:
            raise _Refused(err(1251, _OLD_PROTOCOL, None)) from None

    async def _authenticate(self, login: Login, backing: Backing) -> None:
        """Let the client prove its password. _Refused with ERR 1045 or 3118."""
        account = matching(await backing.accounts(login.user), self._peer_ip)
        if account is None:
            raise self._denied(login, login.auth)
        proof = login.auth
        if login.plugin != NATIVE_PASSWORD and login.capabilities & Capability.PLUGIN_AUTH:
            self._stream.send(b"\xfe" + NATIVE_PASSWORD.encode() + b"\0" + self._salt + b"\0")
            proof = await self._stream.read()
        if not account.accepts(self._salt, proof):
            raise self._denied(login, login.auth or proof)
        if account.locked:
            where = f"'{login.user}'@'{account.host}'"
            raise _Refused(err(3118, f"Access denied for user {where}. Account is locked.", "HY000"))

    def _denied(self, login: Login, auth: bytes) -> _Refused:
        used = "YES" if auth else "NO"
        text = f"Access denied for user '{login.user}'@'{self._peer_ip}' (using password: {used})"
        return _Refused(err(1045, text, "28000"))

    def _answer_nonsense(self, error: Exception) -> None:
        """The login broke the protocol. MariaDB's sequence numbers are right, so it was the client."""
        if isinstance(error, BadSequence):
            self._node.violation(self._peer, str(error))
            self._stream.sequence = (error.got + 1) & 0xFF
            self._stream.send(err(8052, str(error), None))
        elif isinstance(error, PacketTooLarge):
            self._stream.sequence = (self._stream.sequence + 1) & 0xFF
            self._stream.send(err(1153, "Got a packet bigger than 'max_allowed_packet' bytes", None))
        else:
            self._node.violation(self._peer, str(error))
            self._stream.send(err(1105, "malform packet error", None))


def _peer_of(stream: PacketStream) -> tuple[str, str]:
    """The peer's IP address and its `host:port`; an IPv4 address is one, even on an IPv6 socket."""
    name = stream.transport.get_extra_info("peername")
    if not name:
        return "", ""  # it has gone already
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    text = str(mapped or address)
    return text, join(text, name[1])

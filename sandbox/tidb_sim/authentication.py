"""How a client proves who it is: TiDB's plugins, and the questions that it asks for them.

Order, odd cases and what is missing (no fast path and no RSA key for caching_sha2_password):
pingcap/tidb pkg/server/conn.go, `checkAuthPlugin` and `authSha`.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.tidb_sim.accounts import Account, Plugin, Requirement, matching
from sandbox.tidb_sim.greeting import Login
from sandbox.tidb_sim.migration_rules import MoveRules
from sandbox.tidb_sim.packets import Capability
from sandbox.tidb_sim.session_token import TokenRejected, check
from sandbox.tidb_sim.stream import PacketStream

OLD_PROTOCOL = (
    "Client does not support authentication protocol requested by server; consider upgrading MySQL client"
)


_ASKS_IN_CLEAR = b"\x01\x04"
"""AuthMoreData: send the password itself (MySQL: perform full authentication)."""


class Refused(Exception):
    """The client gets ERR with this and is closed."""

    def __init__(self, code: int, message: str, state: str) -> None:
        self.code, self.message, self.state = code, message, state
        super().__init__(f"{code} ({state}): {message}")


class BadToken(Refused):
    """A token that no correct proxy sends. The client is only told that it is denied; `reason` says why."""

    def __init__(self, denied: Refused, reason: str) -> None:
        self.reason = reason
        super().__init__(denied.code, denied.message, denied.state)


@dataclass(frozen=True)
class Secured:
    """What the connection's TLS proves. `certified`: the client showed a certificate of a known authority."""

    tls: bool = False
    certified: bool = False

    @classmethod
    def of(cls, stream: PacketStream) -> Secured:
        """What holds for a connection now."""
        tls = stream.transport.get_extra_info("ssl_object")
        if not isinstance(tls, ssl.SSLObject):
            return cls()
        return cls(True, bool(tls.getpeercert()))

    def meets(self, requirement: Requirement) -> bool:
        """Whether an account that requires this may be used."""
        return {
            Requirement.NONE: True,
            Requirement.SSL: self.tls,
            Requirement.CERTIFICATE: self.certified,
        }[requirement]


class Authentication:
    """What one connection is asked; `salt` and the plugin last asked for hold for all its users."""

    def __init__(self, stream: PacketStream, salt: bytes, plugin: str, moves: MoveRules) -> None:
        self._stream, self._salt, self._plugin, self._moves = stream, salt, plugin, moves

    async def login(self, login: Login, accounts: Sequence[Account], peer: str) -> Account:
        """The account that a client at `peer` (an IP address) logs in to. Refused; what a stream raises."""
        if login.plugin == Plugin.SESSION_TOKEN:
            return self._by_token(login, accounts, peer)
        account = self._account(login, accounts, peer)
        plugin, proof = await self._proof(login, account, peer)
        if plugin in (Plugin.SHA2, Plugin.SM3) and proof:
            # Whatever the client made of the salt counts for nothing: the password itself is asked for.
            self._stream.send(_ASKS_IN_CLEAR)
            proof = (await self._stream.read()).strip(b"\0")
        return self._checked(login, account, peer, proof)

    async def change_user(self, login: Login, accounts: Sequence[Account], peer: str) -> Account:
        """As `login`, for COM_CHANGE_USER, whose oddity TiDB's is: no password is ever asked for in clear.

        Hence nobody with a password of caching_sha2_password or tidb_sm3_password gets in that way.
        """
        account = self._account(login, accounts, peer)
        proof = (await self._proof(login, account, peer))[1] if login.plugin else login.auth
        return self._checked(login, account, peer, proof)

    def _account(self, login: Login, accounts: Sequence[Account], peer: str) -> Account:
        account = matching(accounts, peer)
        if account is None or account.plugin == Plugin.SOCKET or login.plugin == Plugin.SESSION_TOKEN:
            raise _denied(login, peer, login.auth)
        return account

    def _by_token(self, login: Login, accounts: Sequence[Account], peer: str) -> Account:
        """Whatever plugin and password the account has (pingcap/tidb pkg/privilege/privileges)."""
        account = matching(accounts, peer)
        denied = _denied(login, peer, login.auth)
        signer = self._moves.signer
        if account is None or not Secured.of(self._stream).meets(account.requirement) or signer is None:
            raise denied
        try:
            check(signer, login.auth, login.user, self._moves.now())
        except TokenRejected as rejection:
            raise BadToken(denied, str(rejection)) from rejection
        return _unlocked(account, login)

    async def _proof(self, login: Login, account: Account, peer: str) -> tuple[str, bytes]:
        """The plugin that counts, and what the client sends for it, asked for if need be."""
        if self._plugin == account.plugin == login.plugin:
            return account.plugin, login.auth
        if not login.capabilities & Capability.PLUGIN_AUTH:
            if account.plugin != Plugin.NATIVE:
                raise Refused(1251, OLD_PROTOCOL, "08004")
            return account.plugin, login.auth
        asked = Plugin.CLEAR if account.plugin == Plugin.TOKEN else account.plugin
        told = Plugin.CLEAR if asked == Plugin.LDAP_SIMPLE else asked
        self._stream.send(b"\xfe" + told.encode() + b"\0" + self._salt + b"\0")
        reply = await self._stream.read()
        self._plugin = asked
        # An empty reply does not replace what came first: so it is in TiDB.
        return asked, reply or login.auth

    def _checked(self, login: Login, account: Account, peer: str, proof: bytes) -> Account:
        native = account.plugin == Plugin.NATIVE
        accepts = account.accepts(self._salt, proof) if native else account.accepts_clear(proof.rstrip(b"\0"))
        if not accepts or not Secured.of(self._stream).meets(account.requirement):
            raise _denied(login, peer, proof)
        return _unlocked(account, login)


def _unlocked(account: Account, login: Login) -> Account:
    if account.locked:
        where = f"'{login.user}'@'{account.host}'"
        raise Refused(3118, f"Access denied for user {where}. Account is locked.", "HY000")
    return account


def _denied(login: Login, peer: str, proof: bytes) -> Refused:
    used = "YES" if proof else "NO"
    return Refused(1045, f"Access denied for user '{login.user}'@'{peer}' (using password: {used})", "28000")

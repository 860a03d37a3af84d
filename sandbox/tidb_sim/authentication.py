"""Client authentication: TiDB's plugins and the packets exchanged for them.

Order, special cases and what is missing (no fast path and no RSA key for caching_sha2_password):
pingcap/tidb pkg/server/conn.go, `checkAuthPlugin` and `authSha`.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.tidb_sim.accounts import Account, AuthPlugin, TlsRequirement, find_account
from sandbox.tidb_sim.greeting import ClientLogin
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import Capability
from sandbox.tidb_sim.session_token import TokenRejected, verify_token
from sandbox.tidb_sim.stream import PacketStream

OLD_PROTOCOL = (
    "Client does not support authentication protocol requested by server; consider upgrading MySQL client"
)


_REQUEST_CLEAR_PASSWORD = b"\x01\x04"
"""AuthMoreData: send the password itself (MySQL: perform full authentication)."""


class LoginRefused(Exception):
    """The login failed: the client gets this ERR and the connection is closed."""

    def __init__(self, code: int, message: str, state: str) -> None:
        self.code, self.message, self.state = code, message, state
        super().__init__(f"{code} ({state}): {message}")


class InvalidSessionToken(LoginRefused):
    """A token that no correct proxy sends.

    The client only gets the usual denial; `reason` has the details.
    """

    def __init__(self, denied: LoginRefused, reason: str) -> None:
        self.reason = reason
        super().__init__(denied.code, denied.message, denied.state)


@dataclass(frozen=True)
class ConnectionSecurity:
    """What the connection's TLS proves. `has_client_certificate`: signed by a known authority."""

    tls: bool = False
    has_client_certificate: bool = False

    @classmethod
    def from_stream(cls, stream: PacketStream) -> ConnectionSecurity:
        """Return the current state of a connection."""
        tls = stream.transport.get_extra_info("ssl_object")
        if not isinstance(tls, ssl.SSLObject):
            return cls()
        return cls(True, bool(tls.getpeercert()))

    def satisfies(self, requirement: TlsRequirement) -> bool:
        """Return whether an account with this requirement may be used."""
        return {
            TlsRequirement.NONE: True,
            TlsRequirement.SSL: self.tls,
            TlsRequirement.CLIENT_CERTIFICATE: self.has_client_certificate,
        }[requirement]


class Authenticator:
    """Authenticates one connection; `salt` and the last requested plugin apply to all its users."""

    def __init__(self, stream: PacketStream, salt: bytes, plugin: str, migration: MigrationRules) -> None:
        self._stream, self._salt, self._plugin, self._migration = stream, salt, plugin, migration

    async def authenticate(self, login: ClientLogin, accounts: Sequence[Account], peer_ip: str) -> Account:
        """Return the account of a client at `peer_ip`. Raises LoginRefused, and what the stream raises."""
        if login.plugin == AuthPlugin.SESSION_TOKEN:
            return self._login_by_token(login, accounts, peer_ip)
        account = self._find_account(login, accounts, peer_ip)
        plugin, credential = await self._request_credential(login, account, peer_ip)
        if plugin in (AuthPlugin.SHA2, AuthPlugin.SM3) and credential:
            # The scrambled password is ignored, as in TiDB: the clear password is requested.
            self._stream.send(_REQUEST_CLEAR_PASSWORD)
            credential = (await self._stream.read()).strip(b"\0")
        return self._verify(login, account, peer_ip, credential)

    async def change_user(self, login: ClientLogin, accounts: Sequence[Account], peer_ip: str) -> Account:
        """Like `authenticate`, for COM_CHANGE_USER, for which TiDB never requests a password in clear text.

        Hence no account with a password of caching_sha2_password or tidb_sm3_password can log in this way.
        """
        account = self._find_account(login, accounts, peer_ip)
        credential = (
            (await self._request_credential(login, account, peer_ip))[1]
            if login.plugin
            else login.auth_response
        )
        return self._verify(login, account, peer_ip, credential)

    def _find_account(self, login: ClientLogin, accounts: Sequence[Account], peer: str) -> Account:
        account = find_account(accounts, peer)
        if account is None or account.plugin == AuthPlugin.SOCKET or login.plugin == AuthPlugin.SESSION_TOKEN:
            raise _access_denied(login, peer, login.auth_response)
        return account

    def _login_by_token(self, login: ClientLogin, accounts: Sequence[Account], peer: str) -> Account:
        """Accept a token for accounts with any plugin (pingcap/tidb pkg/privilege/privileges)."""
        account = find_account(accounts, peer)
        denied = _access_denied(login, peer, login.auth_response)
        signer = self._migration.signer
        if (
            account is None
            or not ConnectionSecurity.from_stream(self._stream).satisfies(account.tls_requirement)
            or signer is None
        ):
            raise denied
        try:
            verify_token(signer, login.auth_response, login.user, self._migration.now_nanoseconds())
        except TokenRejected as rejection:
            raise InvalidSessionToken(denied, str(rejection)) from rejection
        return _check_unlocked(account, login)

    async def _request_credential(self, login: ClientLogin, account: Account, peer: str) -> tuple[str, bytes]:
        """Return the plugin in effect and the client's credential for it, requested if needed."""
        if self._plugin == account.plugin == login.plugin:
            return account.plugin, login.auth_response
        if not login.capabilities & Capability.PLUGIN_AUTH:
            if account.plugin != AuthPlugin.NATIVE:
                raise LoginRefused(1251, OLD_PROTOCOL, "08004")
            return account.plugin, login.auth_response
        requested_plugin = AuthPlugin.CLEAR_PASSWORD if account.plugin == AuthPlugin.TOKEN else account.plugin
        sent_plugin = (
            AuthPlugin.CLEAR_PASSWORD if requested_plugin == AuthPlugin.LDAP_SIMPLE else requested_plugin
        )
        self._stream.send(b"\xfe" + sent_plugin.encode() + b"\0" + self._salt + b"\0")
        reply = await self._stream.read()
        self._plugin = requested_plugin
        # As in TiDB, an empty reply does not replace the first credential.
        return requested_plugin, reply or login.auth_response

    def _verify(self, login: ClientLogin, account: Account, peer: str, credential: bytes) -> Account:
        native = account.plugin == AuthPlugin.NATIVE
        accepts = (
            account.verify_native_password(self._salt, credential)
            if native
            else account.verify_clear_password(credential.rstrip(b"\0"))
        )
        if not accepts or not ConnectionSecurity.from_stream(self._stream).satisfies(account.tls_requirement):
            raise _access_denied(login, peer, credential)
        return _check_unlocked(account, login)


def _check_unlocked(account: Account, login: ClientLogin) -> Account:
    if account.locked:
        where = f"'{login.user}'@'{account.host}'"
        raise LoginRefused(3118, f"Access denied for user {where}. Account is locked.", "HY000")
    return account


def _access_denied(login: ClientLogin, peer: str, credential: bytes) -> LoginRefused:
    used = "YES" if credential else "NO"
    return LoginRefused(
        1045, f"Access denied for user '{login.user}'@'{peer}' (using password: {used})", "28000"
    )

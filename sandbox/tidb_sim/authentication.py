"""Client authentication: TiDB's plugins and the packets exchanged for them.

The order and the special cases are TiDB's (pingcap/tidb pkg/server/conn.go, `checkAuthPlugin` and `authSha`).
Like TiDB, this module lacks the fast path and the RSA key of caching_sha2_password.
"""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.tidb_sim.accounts import Account, AuthPlugin, find_account
from sandbox.tidb_sim.greeting import OLD_PROTOCOL, ClientLogin, LoginRefused
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import Capability
from sandbox.tidb_sim.session_token import TokenRejected, verify_token
from sandbox.tidb_sim.stream import PacketStream

_REQUEST_CLEAR_PASSWORD = b"\x01\x04"
"""AuthMoreData that requests the password in clear text (MySQL: "perform full authentication")."""


class Authenticator:
    """Authenticates the users of one connection, which share the salt and the last requested plugin."""

    def __init__(self, stream: PacketStream, salt: bytes, migration: MigrationRules) -> None:
        self._stream, self._salt, self._migration = stream, salt, migration
        self._plugin: str = AuthPlugin.NATIVE  # The greeting names this plugin.

    async def authenticate(self, login: ClientLogin, accounts: Sequence[Account], peer_ip: str) -> Account:
        """Return the account of a client at `peer_ip`. Raises LoginRefused, and what the stream raises."""
        if login.plugin == AuthPlugin.SESSION_TOKEN:
            return self._login_by_token(login, accounts, peer_ip)
        account = self._find_account(login, accounts, peer_ip)
        plugin, credential = await self._request_credential(login, account)
        if plugin == AuthPlugin.SHA2 and credential:
            # As in TiDB, the scrambled password is ignored, and the clear password is requested.
            self._stream.send(_REQUEST_CLEAR_PASSWORD)
            credential = (await self._stream.read()).strip(b"\0")
        return self._verify(login, account, peer_ip, credential)

    async def change_user(self, login: ClientLogin, accounts: Sequence[Account], peer_ip: str) -> Account:
        """Authenticate a COM_CHANGE_USER. Returns and raises the same as `authenticate`.

        TiDB does not request the password in clear text here. So accounts of caching_sha2_password
        cannot log in this way, unless their password is empty.
        """
        account = self._find_account(login, accounts, peer_ip)
        credential = login.auth_response
        if login.plugin:
            _, credential = await self._request_credential(login, account)
        return self._verify(login, account, peer_ip, credential)

    def _find_account(self, login: ClientLogin, accounts: Sequence[Account], peer: str) -> Account:
        account = find_account(accounts, peer)
        if account is None or login.plugin == AuthPlugin.SESSION_TOKEN:
            raise _access_denied(login, peer, login.auth_response)
        return account

    def _login_by_token(self, login: ClientLogin, accounts: Sequence[Account], peer: str) -> Account:
        """Accept a token for accounts with any plugin (pingcap/tidb pkg/privilege/privileges)."""
        account = find_account(accounts, peer)
        denied = _access_denied(login, peer, login.auth_response)
        signer = self._migration.signer
        if account is None or signer is None:
            raise denied
        try:
            verify_token(signer, login.auth_response, login.user, self._migration.now_nanoseconds())
        except TokenRejected as rejection:
            denied.violation = f"a login by token: {rejection}"  # No correct proxy causes this.
            raise denied from rejection
        return account

    async def _request_credential(self, login: ClientLogin, account: Account) -> tuple[str, bytes]:
        """Return the plugin to use and the client's credential for it. Request the credential if needed."""
        if self._plugin == account.plugin == login.plugin:
            return account.plugin, login.auth_response
        if not login.capabilities & Capability.PLUGIN_AUTH:
            if account.plugin != AuthPlugin.NATIVE:
                raise LoginRefused(1251, OLD_PROTOCOL, "08004")
            return account.plugin, login.auth_response
        requested_plugin = AuthPlugin.CLEAR_PASSWORD if account.plugin == AuthPlugin.TOKEN else account.plugin
        self._stream.send(b"\xfe" + requested_plugin.encode() + b"\0" + self._salt + b"\0")
        reply = await self._stream.read()
        self._plugin = requested_plugin
        # As in TiDB, an empty reply does not replace the first credential.
        return requested_plugin, reply or login.auth_response

    def _verify(self, login: ClientLogin, account: Account, peer: str, credential: bytes) -> Account:
        accepts = (
            account.verify_native_password(self._salt, credential)
            if account.plugin == AuthPlugin.NATIVE
            else account.verify_clear_password(credential.rstrip(b"\0"))
        )
        if not accepts:
            raise _access_denied(login, peer, credential)
        return account


def _access_denied(login: ClientLogin, peer: str, credential: bytes) -> LoginRefused:
    used = "YES" if credential else "NO"
    return LoginRefused(
        1045, f"Access denied for user '{login.user}'@'{peer}' (using password: {used})", "28000"
    )

"""The accounts that may log in. They are stored in the shared MariaDB, so all simulated servers have them."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD

_PASSWORD_HASH = re.compile(r"\*[0-9A-Fa-f]{40}")
MARIADB_SUBSTITUTE_PLUGIN = "unix_socket"
"""MariaDB's plugin of accounts whose plugin only TiDB has. Their authentication string is `<plugin>:<hash>`.

MariaDB accepts any string for this plugin, and no client can log in to MariaDB with these accounts.
"""


class AuthPlugin(StrEnum):
    """Plugins that an account or a client can name."""

    NATIVE = NATIVE_PASSWORD
    SHA2 = "caching_sha2_password"
    TOKEN = "tidb_auth_token"
    CLEAR_PASSWORD = "mysql_clear_password"  # Sent by clients only.
    SESSION_TOKEN = "tidb_session_token"  # Sent by clients only; TiDB accepts it for any account.


@dataclass(frozen=True)
class Account:
    """One account. `password` is a hash of mysql_native_password (`*` and 40 hex digits), or "" for none.

    All plugins use this format here, since a client cannot see how TiDB stores a password.
    """

    host: str
    password: str
    plugin: str = NATIVE_PASSWORD

    @classmethod
    def from_row(cls, host: str, privileges: str) -> Account:
        """Build an account from `Host` and `Priv` (JSON) of MariaDB's table `mysql.global_priv`."""
        stored = json.loads(privileges)
        plugin, text = stored.get("plugin", NATIVE_PASSWORD), stored.get("authentication_string", "")
        if plugin == MARIADB_SUBSTITUTE_PLUGIN:
            plugin, _, text = text.partition(":")
        return cls(host, text, plugin)

    def verify_native_password(self, salt: bytes, scramble: bytes) -> bool:
        """Return whether `scramble` is the correct response to `salt` for the password."""
        if len(scramble) != 20 or not _PASSWORD_HASH.fullmatch(self.password):
            return not scramble and not self.password
        stage2 = bytes.fromhex(self.password[1:])
        mask = hashlib.sha1(salt + stage2).digest()
        stage1 = bytes(left ^ right for left, right in zip(scramble, mask, strict=True))
        return hashlib.sha1(stage1).digest() == stage2

    def verify_clear_password(self, password: bytes) -> bool:
        """Return whether `password` is the password, which may be empty."""
        return (hash_password(password) if password else "") == self.password


def hash_password(password: bytes) -> str:
    """Return the hash that is stored for a non-empty password."""
    return "*" + hashlib.sha1(hashlib.sha1(password).digest()).hexdigest().upper()


def find_account(accounts: Iterable[Account], peer_ip: str) -> Account | None:
    """Return the account for a peer's IP address: rather one for this host than one for all (`%`)."""
    matching = [account for account in accounts if _host_matches(account.host, peer_ip)]
    return min(matching, key=lambda account: account.host == "%", default=None)


def _host_matches(host: str, peer: str) -> bool:
    if host == "localhost":
        return not peer or ipaddress.ip_address(peer).is_loopback
    return host in ("%", peer)

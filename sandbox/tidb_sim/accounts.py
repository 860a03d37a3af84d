"""The accounts that may log in. They are stored in the shared MariaDB, so all simulated servers have them."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

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
    SM3 = "tidb_sm3_password"
    TOKEN = "tidb_auth_token"
    LDAP_SIMPLE = "authentication_ldap_simple"
    SOCKET = "auth_socket"
    CLEAR_PASSWORD = "mysql_clear_password"  # Sent by clients only.
    SESSION_TOKEN = "tidb_session_token"  # Sent by clients only; TiDB accepts it for any account.


class TlsRequirement(IntEnum):
    """The TLS that an account requires: none, REQUIRE SSL, or REQUIRE X509 and stricter clauses."""

    NONE = 0
    SSL = 1
    CLIENT_CERTIFICATE = 2


@dataclass(frozen=True)
class Account:
    """One account. `passwords` are hashes of mysql_native_password (`*` and 40 hex digits), or "" for none.

    All plugins use this format here, since a client cannot see how TiDB stores a password.
    """

    host: str
    passwords: tuple[str, ...]
    locked: bool
    plugin: str = NATIVE_PASSWORD
    tls_requirement: TlsRequirement = TlsRequirement.NONE

    @classmethod
    def from_row(cls, host: str, privileges: str) -> Account:
        """Build an account from `Host` and `Priv` (JSON) of MariaDB's table `mysql.global_priv`."""
        stored = json.loads(privileges)
        # `auth_or` contains alternatives. An empty alternative means the plugin of the account itself.
        methods = [_auth_method(alternative or stored) for alternative in stored.get("auth_or", [stored])]
        plugin = NATIVE_PASSWORD if any(name == NATIVE_PASSWORD for name, _ in methods) else methods[0][0]
        return cls(
            host,
            tuple(text for name, text in methods if name == plugin and name != AuthPlugin.SOCKET),
            stored.get("account_locked", False),
            plugin,
            # `ssl_type` 3 requires a certain issuer, subject or cipher; it is treated like X509.
            TlsRequirement(min(stored.get("ssl_type", 0), TlsRequirement.CLIENT_CERTIFICATE)),
        )

    def verify_native_password(self, salt: bytes, scramble: bytes) -> bool:
        """Return whether `scramble` is the correct response to `salt` for one of the passwords."""
        if len(scramble) != 20:
            return not scramble and "" in self.passwords
        for stored in filter(_PASSWORD_HASH.fullmatch, self.passwords):
            stage2 = bytes.fromhex(stored[1:])
            mask = hashlib.sha1(salt + stage2).digest()
            stage1 = bytes(left ^ right for left, right in zip(scramble, mask, strict=True))
            if hashlib.sha1(stage1).digest() == stage2:
                return True
        return False

    def verify_clear_password(self, password: bytes) -> bool:
        """Return whether `password` is one of the passwords, which may be empty."""
        return (hash_password(password) if password else "") in self.passwords


def hash_password(password: bytes) -> str:
    """Return the hash that is stored for a non-empty password."""
    return "*" + hashlib.sha1(hashlib.sha1(password).digest()).hexdigest().upper()


def find_account(accounts: Iterable[Account], peer_ip: str) -> Account | None:
    """Return the account for a peer's IP address: the one with the most specific host, as in MySQL."""
    matching = [account for account in accounts if _host_matches(account.host, peer_ip)]
    return min(matching, key=lambda account: _host_specificity_key(account.host), default=None)


def _auth_method(stored: Mapping[str, str]) -> tuple[str, str]:
    """Return TiDB's name of the plugin, and the stored hash."""
    plugin, text = stored.get("plugin", NATIVE_PASSWORD), stored.get("authentication_string", "")
    if plugin == MARIADB_SUBSTITUTE_PLUGIN:
        tidb_plugin, colon, text = text.partition(":")
        return (tidb_plugin, text) if colon else (AuthPlugin.SOCKET, "")
    return plugin, text


def _host_matches(host: str, peer: str) -> bool:
    if host == "localhost":
        return not peer or ipaddress.ip_address(peer).is_loopback
    if "/" in host:
        try:
            return ipaddress.ip_address(peer) in ipaddress.ip_network(host)
        except ValueError:
            return False
    pattern = "".join({"%": ".*", "_": "."}.get(char, re.escape(char)) for char in host)
    return re.fullmatch(pattern or ".*", peer, re.IGNORECASE) is not None


def _host_specificity_key(host: str) -> tuple[bool, int]:
    """Return a sort key: exact hosts first, then patterns, those with the longest literal prefix first."""
    prefix = re.split("[%_/]", host, maxsplit=1)[0]
    return ("%" in host or "_" in host or "/" in host or not host, -len(prefix))

"""Who may log in: the accounts of the shared MariaDB: CREATE USER through one stand-in counts for all."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD

CARRIER_PLUGIN = "unix_socket"
"""The plugin of MariaDB whose accounts carry those of TiDB's plugins: their text is `<plugin>:<hash>`.

MariaDB keeps any text for it, and nobody can use these accounts at MariaDB itself.
"""


class AuthPlugin(StrEnum):
    """Plugins that an account or a client can name."""

    NATIVE = NATIVE_PASSWORD
    SHA2 = "caching_sha2_password"
    SM3 = "tidb_sm3_password"
    TOKEN = "tidb_auth_token"
    LDAP_SIMPLE = "authentication_ldap_simple"
    SOCKET = "auth_socket"
    CLEAR_PASSWORD = "mysql_clear_password"
    """Only a client's."""
    SESSION_TOKEN = "tidb_session_token"
    """Only a client's; TiDB takes it for any account."""


class TlsRequirement(Enum):
    """What an account demands of the connection: REQUIRE SSL, or REQUIRE X509 and what is stricter."""

    NONE = auto()
    SSL = auto()
    CLIENT_CERTIFICATE = auto()


@dataclass(frozen=True)
class Account:
    """One account. `passwords`: hashes as of mysql_native_password, `*` and 40 hex digits, or empty.

    So they are whatever the plugin: how TiDB stores a password cannot be seen from outside.
    """

    host: str
    passwords: tuple[str, ...]
    locked: bool
    plugin: str = NATIVE_PASSWORD
    tls_requirement: TlsRequirement = TlsRequirement.NONE

    @classmethod
    def from_row(cls, host: str, privileges: str) -> Account:
        """From `Host` and `Priv` (JSON) of MariaDB's table `mysql.global_priv`."""
        stored = json.loads(privileges)
        # `auth_or` holds alternatives; an empty one stands for the plugin of the account itself.
        methods = [_auth_method(way or stored) for way in stored.get("auth_or", [stored])]
        plugin = NATIVE_PASSWORD if any(name == NATIVE_PASSWORD for name, _ in methods) else methods[0][0]
        return cls(
            host,
            tuple(text for name, text in methods if name == plugin and name != AuthPlugin.SOCKET),
            stored.get("account_locked", False),
            plugin,
            _TLS_REQUIREMENT_BY_SSL_TYPE.get(stored.get("ssl_type", 0), TlsRequirement.NONE),
        )

    def verify_native_password(self, salt: bytes, scramble: bytes) -> bool:
        """Whether `proof`, made with `salt` by mysql_native_password, proves one of the passwords."""
        return any(_verify_scramble(stored, salt, scramble) for stored in self.passwords)

    def verify_clear_password(self, password: bytes) -> bool:
        """Whether `password` is one of the passwords; the empty one only if that is stored."""
        return (hash_password(password) if password else "") in self.passwords


def hash_password(password: bytes) -> str:
    """What is stored of a password that is not empty."""
    return "*" + hashlib.sha1(hashlib.sha1(password).digest()).hexdigest().upper()


def find_account(accounts: Iterable[Account], peer_ip: str) -> Account | None:
    """The account that counts for a peer's IP address: the one with the most specific host, as in MySQL."""
    fitting = [account for account in accounts if _host_matches(account.host, peer_ip)]
    return min(fitting, key=lambda account: _host_specificity_key(account.host), default=None)


# Of MariaDB's table: 1 = SSL, 2 = X509, 3 = a certain issuer, subject or cipher.
_TLS_REQUIREMENT_BY_SSL_TYPE = {
    1: TlsRequirement.SSL,
    2: TlsRequirement.CLIENT_CERTIFICATE,
    3: TlsRequirement.CLIENT_CERTIFICATE,
}


def _auth_method(stored: Mapping[str, str]) -> tuple[str, str]:
    """Plugin, by TiDB's name, and stored hash."""
    plugin, text = stored.get("plugin", NATIVE_PASSWORD), stored.get("authentication_string", "")
    if plugin == CARRIER_PLUGIN:
        carried, colon, text = text.partition(":")
        return (carried, text) if colon else (AuthPlugin.SOCKET, "")
    return plugin, text


def _verify_scramble(stored: str, salt: bytes, scramble: bytes) -> bool:
    if not stored:
        return not scramble
    if len(scramble) != 20 or not re.fullmatch(r"\*[0-9A-Fa-f]{40}", stored):
        return False
    stage2 = bytes.fromhex(stored[1:])
    mask = hashlib.sha1(salt + stage2).digest()
    stage1 = bytes(left ^ right for left, right in zip(scramble, mask, strict=True))
    return hashlib.sha1(stage1).digest() == stage2


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
    """Exact hosts first, then patterns, those with the longest beginning first."""
    beginning = re.split("[%_/]", host, maxsplit=1)[0]
    return ("%" in host or "_" in host or "/" in host or not host, -len(beginning))

"""Who may log in: the accounts of the shared MariaDB: CREATE USER through one stand-in counts for all."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox.tidb_sim.greeting import NATIVE_PASSWORD


@dataclass(frozen=True)
class Account:
    """One account. `passwords`: stored hashes of mysql_native_password, `*` and 40 hex digits, or empty."""

    host: str
    passwords: tuple[str, ...]
    locked: bool

    @classmethod
    def from_row(cls, host: str, privileges: str) -> Account:
        """From `Host` and `Priv` (JSON) of MariaDB's table `mysql.global_priv`."""
        stored = json.loads(privileges)
        # `auth_or` holds alternatives; an empty one stands for the plugin of the account itself.
        ways = [way or stored for way in stored.get("auth_or", [stored])]
        return cls(
            host,
            tuple(
                way.get("authentication_string", "")
                for way in ways
                if way.get("plugin", NATIVE_PASSWORD) == NATIVE_PASSWORD
            ),
            stored.get("account_locked", False),
        )

    def accepts(self, salt: bytes, proof: bytes) -> bool:
        """Whether `proof`, made with `salt` by mysql_native_password, proves one of the passwords."""
        return any(_proves(stored, salt, proof) for stored in self.passwords)


def matching(accounts: Iterable[Account], peer: str) -> Account | None:
    """The account that counts for a peer's IP address: the one with the most specific host, as in MySQL."""
    fitting = [account for account in accounts if _covers(account.host, peer)]
    return min(fitting, key=lambda account: _vagueness(account.host), default=None)


def _proves(stored: str, salt: bytes, proof: bytes) -> bool:
    if not stored:
        return not proof
    if len(proof) != 20 or not re.fullmatch(r"\*[0-9A-Fa-f]{40}", stored):
        return False
    twice = bytes.fromhex(stored[1:])
    mask = hashlib.sha1(salt + twice).digest()
    once = bytes(left ^ right for left, right in zip(proof, mask, strict=True))
    return hashlib.sha1(once).digest() == twice


def _covers(host: str, peer: str) -> bool:
    if host == "localhost":
        return not peer or ipaddress.ip_address(peer).is_loopback
    if "/" in host:
        try:
            return ipaddress.ip_address(peer) in ipaddress.ip_network(host)
        except ValueError:
            return False
    pattern = "".join({"%": ".*", "_": "."}.get(char, re.escape(char)) for char in host)
    return re.fullmatch(pattern or ".*", peer, re.IGNORECASE) is not None


def _vagueness(host: str) -> tuple[bool, int]:
    """Exact hosts first, then patterns, those with the longest beginning first."""
    beginning = re.split("[%_/]", host, maxsplit=1)[0]
    return ("%" in host or "_" in host or "/" in host or not host, -len(beginning))

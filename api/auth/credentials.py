"""The credentials in a request, and the lookup of their owner in the configuration.

Tokens are compared by their SHA-256 hash, with every configured hash and in constant time, so that the
response time reveals nothing about a guess.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from api.auth.caller import CallerRole
from controlplane.config.api import ApiSettings

COOKIE_NAME = "tidevoy_token"
TOKEN_PREFIX = "tvy_"  # noqa: S105 - not a secret
_TOKEN_BYTES = 32  # random bytes in a token
_MAX_TOKEN_BYTES = 512  # longer values are never tokens

RawHeaders = Iterable[tuple[bytes, bytes]]


def new_token() -> str:
    """Return a random token. Its prefix lets secret scanners find a leaked one."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def sha256(token: bytes) -> str:
    """Return the hash of a token in hexadecimal, as the configuration stores it."""
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """The credentials in a request. None: absent. An empty value is never a valid token."""

    bearer: bytes | None = None
    cookie: bytes | None = None
    certificate_names: tuple[str, ...] = ()  # of the client certificate, verified by the TLS handshake

    @property
    def is_empty(self) -> bool:
        """Whether the request has no credentials."""
        return self.bearer is None and self.cookie is None and not self.certificate_names


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of a token or certificate."""

    name: str
    role: CallerRole
    by_cookie: bool = False  # a browser sends cookies on its own, also for requests of cross-origin pages


def read_credentials(headers: RawHeaders, certificate_names: tuple[str, ...] = ()) -> PresentedCredentials:
    """Read the credentials from raw header fields, whose names must be in lower case."""
    bearer: bytes | None = None
    cookie: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            # A second header, or one of another scheme, makes the token invalid: the intent is ambiguous.
            is_bearer = bearer is None and scheme.lower() == b"bearer"
            bearer = token.strip() if is_bearer else b""
        elif name == b"cookie":
            for pair in value.split(b";"):
                key, _, cookie_value = pair.strip().partition(b"=")
                if key == COOKIE_NAME.encode():
                    cookie = cookie_value.strip()
    return PresentedCredentials(bearer, cookie, certificate_names)


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a client certificate in the form of `ssl.SSLObject.getpeercert`; () without one.

    The common name counts only if there is no subject alternative name (RFC 9525, section 2).
    """
    if not certificate:
        return ()
    if alternative := certificate.get("subjectAltName", ()):
        return tuple(name for kind, name in alternative if kind in ("DNS", "URI", "email"))
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return tuple(value for key, value in subject if key == "commonName")


class CredentialStore:
    """The tokens and client certificates in the configuration."""

    def __init__(self, api: ApiSettings) -> None:
        self._tokens = [
            (token.sha256.get_secret_value(), Principal(token.name, CallerRole(token.role)))
            for token in api.tokens
        ]
        self._clients = [
            (client.name, Principal(client.name, CallerRole(client.role))) for client in api.clients
        ]

    def find(self, presented: PresentedCredentials) -> Principal | None:
        """Return the owner of the credentials, or None. A wrong bearer token gives None in any case."""
        if presented.bearer is not None:
            return self._find_token(presented.bearer)
        if presented.cookie is not None and (owner := self._find_token(presented.cookie)) is not None:
            return Principal(owner.name, owner.role, by_cookie=True)
        return next((owner for name, owner in self._clients if name in presented.certificate_names), None)

    def _find_token(self, token: bytes) -> Principal | None:
        digest = sha256(token[:_MAX_TOKEN_BYTES])
        owner: Principal | None = None
        for token_hash, principal in self._tokens:
            if hmac.compare_digest(token_hash, digest):
                owner = principal  # no early exit: the time must not reveal the position in the list
        return owner if 0 < len(token) <= _MAX_TOKEN_BYTES else None

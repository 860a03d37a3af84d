"""The credentials in a request, and the lookup of their owner in the configuration.

The SHA-256 hash of a token is compared with every configured hash in constant time, so that the response
time reveals nothing about a guessed token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from api.auth.caller import Caller, CallerRole
from controlplane.config.api import ApiSettings

COOKIE_NAME = "tidevoy_token"
TOKEN_PREFIX = "tvy_"  # noqa: S105 - not a secret
_TOKEN_BYTES = 32  # random bytes in a token
_MAX_TOKEN_BYTES = 512  # longer values are never tokens

RawHeaders = Iterable[tuple[bytes, bytes]]


def new_token() -> str:
    """Return a random token. Its prefix lets secret scanners find a leaked token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def sha256(token: bytes) -> str:
    """Return the hash of a token in hexadecimal, as the configuration stores it."""
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """The credentials in a request; None if absent. An empty value is never a valid token."""

    bearer: bytes | None = None
    cookie: bytes | None = None
    certificate_names: tuple[str, ...] = ()  # from the client certificate that the TLS handshake verified


def read_credentials(headers: RawHeaders, certificate_names: tuple[str, ...] = ()) -> PresentedCredentials:
    """Read the credentials from raw header fields, whose names must be in lower case."""
    bearer: bytes | None = None
    cookie: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            # A second Authorization header (which is ambiguous) or another scheme makes the token invalid.
            is_bearer = bearer is None and scheme.lower() == b"bearer"
            bearer = token.strip() if is_bearer else b""
        elif name == b"cookie":
            for pair in value.split(b";"):
                key, _, cookie_value = pair.strip().partition(b"=")
                if key == COOKIE_NAME.encode():
                    cookie = cookie_value.strip()
    return PresentedCredentials(bearer, cookie, certificate_names)


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a client certificate returned by `ssl.SSLObject.getpeercert`; () if there is none.

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
            (token.sha256.get_secret_value(), Caller(token.name, CallerRole(token.role)))
            for token in api.tokens
        ]
        self._clients = [Caller(client.name, CallerRole(client.role)) for client in api.clients]

    def find(self, presented: PresentedCredentials) -> Caller | None:
        """Return the owner of the credentials, or None. A bearer token overrides the other credentials."""
        if presented.bearer is not None:
            return self._find_token(presented.bearer)
        if presented.cookie is not None and (owner := self._find_token(presented.cookie)) is not None:
            return replace(owner, by_cookie=True)
        return next((owner for owner in self._clients if owner.name in presented.certificate_names), None)

    def _find_token(self, token: bytes) -> Caller | None:
        digest = sha256(token[:_MAX_TOKEN_BYTES])
        owner: Caller | None = None
        for token_hash, caller in self._tokens:
            if hmac.compare_digest(token_hash, digest):
                owner = caller  # no early exit: the time must not reveal the position in the list
        return owner if 0 < len(token) <= _MAX_TOKEN_BYTES else None

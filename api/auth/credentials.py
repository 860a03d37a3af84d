"""What a request shows of its caller, and whom the configuration knows by it.

Tokens are compared by their SHA-256, with every hash that is known and in constant time: how long it takes
tells nothing of how near a guess came.
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
TOKEN_PREFIX = "tvy_"
_TOKEN_BYTES = 32  # bytes of a token
_MAX_TOKEN_BYTES = 512  # bytes of what may be a token at all

RawHeaders = Iterable[tuple[bytes, bytes]]


def new_token() -> str:
    """A token that nobody can guess; its prefix lets scanners find one that leaked."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def sha256(token: bytes) -> str:
    """What the configuration holds of a token."""
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """What a request shows of its caller. None: it has no such thing; an empty text is never a token."""

    bearer: bytes | None = None
    cookie: bytes | None = None
    certificate_names: tuple[
        str, ...
    ] = ()  # of the client's certificate, which the TLS handshake has verified

    @property
    def is_empty(self) -> bool:
        """Whether it shows nothing at all."""
        return self.bearer is None and self.cookie is None and not self.certificate_names


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is known by a token or certificate."""

    name: str
    role: CallerRole
    by_cookie: bool = False  # a browser adds it by itself, whoever made the page that sends the request


def read_credentials(headers: RawHeaders, certificate_names: tuple[str, ...] = ()) -> PresentedCredentials:
    """The credentials among raw header fields, whose names are in lower case."""
    bearer: bytes | None = None
    cookie: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            # Two of them, or one of another kind, are no token: nobody guesses which one was meant.
            is_bearer = bearer is None and scheme.lower() == b"bearer"
            bearer = token.strip() if is_bearer else b""
        elif name == b"cookie":
            for pair in value.split(b";"):
                key, _, content = pair.strip().partition(b"=")
                if key == COOKIE_NAME.encode():
                    cookie = content.strip()
    return PresentedCredentials(bearer, cookie, certificate_names)


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a client's certificate, as `ssl.SSLObject.getpeercert` gives it; () without one.

    The common name counts only where there is no alternative name (RFC 9525, section 2).
    """
    if not certificate:
        return ()
    if alternative := certificate.get("subjectAltName", ()):
        return tuple(name for kind, name in alternative if kind in ("DNS", "URI", "email"))
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return tuple(value for key, value in subject if key == "commonName")


class CredentialStore:
    """The tokens and certificates that the configuration knows."""

    def __init__(self, api: ApiSettings) -> None:
        self._tokens = [
            (token.sha256.get_secret_value(), Principal(token.name, CallerRole(token.role)))
            for token in api.tokens
        ]
        self._clients = [
            (client.name, Principal(client.name, CallerRole(client.role))) for client in api.clients
        ]

    def find(self, presented: PresentedCredentials) -> Principal | None:
        """Who shows this, or None. A wrong bearer token is refused whatever else is shown."""
        if presented.bearer is not None:
            return self._find_token(presented.bearer)
        if presented.cookie is not None and (found := self._find_token(presented.cookie)) is not None:
            return Principal(found.name, found.role, by_cookie=True)
        return next((holder for name, holder in self._clients if name in presented.certificate_names), None)

    def _find_token(self, token: bytes) -> Principal | None:
        digest = sha256(token[:_MAX_TOKEN_BYTES])
        found: Principal | None = None
        for known, holder in self._tokens:
            if hmac.compare_digest(known, digest):
                found = holder  # and on: the place in the list is not to be seen in the time
        return found if 0 < len(token) <= _MAX_TOKEN_BYTES else None

"""The section `api`: authentication, TLS and rate limits of the REST API.

Tokens are stored as SHA-256 only. They are random (`tidevoy token create`), so a leaked hash does not reveal
a token.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from controlplane import address as addresses
from controlplane.config.types import (
    Cidr,
    File,
    ListenAddress,
    SettingError,
    SettingsSection,
    ValueFormat,
    reject_duplicates,
    section,
    setting,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ANONYMOUS = "anonymous"  # name of unauthenticated callers in audit events
_MAX_CALLERS = 256  # items in each list; a request is compared with every token or client


def _validate_sha256(value: SecretStr) -> SecretStr:
    if not _SHA256.fullmatch(value.get_secret_value()):
        raise SettingError(  # not shown: it may be the token itself
            "this is not a SHA-256 hash",
            "write the 64 characters (0-9, a-f) that `tidevoy token create` prints",
        )
    return value


def _validate_caller_name(value: str) -> str:
    if value == _ANONYMOUS:
        raise SettingError(
            f"{_ANONYMOUS} is reserved for unauthenticated callers in audit events", "choose another name"
        )
    return value


def _validate_host_name(value: str) -> str:
    try:
        return addresses.split(f"{value}:1")[0].lower()
    except ValueError:
        raise SettingError(
            f"{value!r} is not a host name", "write it without scheme and port, as in tidevoy.example.org"
        ) from None


Sha256 = Annotated[SecretStr, AfterValidator(_validate_sha256), ValueFormat("64 characters, 0-9 and a-f")]
CallerName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/:*-]{0,127}$"),
    AfterValidator(_validate_caller_name),
    ValueFormat("up to 128 letters, digits and . _ @ / : * -, such as anna or ci.example.org"),
]
HostName = Annotated[
    str, AfterValidator(_validate_host_name), ValueFormat("a host name, such as tidevoy.example.org")
]
RoleName = Literal["viewer", "operator"]


class ApiTls(SettingsSection):
    """The files are read again when they change."""

    cert: File = setting(..., takes_effect="restart")
    """Server certificate (PEM, with its chain)."""
    key: File = setting(..., takes_effect="restart")
    """Private key (PEM) of that certificate."""
    client_ca: File | None = setting(None, takes_effect="restart")
    """CA (PEM) that client certificates must chain to. If it is set, each client needs a certificate; with
    api.tokens, the client may send a token instead."""


class ApiTokenSettings(SettingsSection):
    """Callers send the token as `Authorization: Bearer ...`."""

    name: CallerName = setting(...)
    """Name of the caller in audit events."""
    role: RoleName = setting(...)
    """viewer: may read. operator: may also change."""
    sha256: Sha256 = setting(...)
    """SHA-256 of the token, in hexadecimal."""


class ApiClientSettings(SettingsSection):
    """A name in the client certificate, and what a caller with this certificate may do."""

    name: CallerName = setting(...)
    """A DNS name, URI or e-mail address in the certificate's subject alternative names; the common name if
    the certificate has none."""
    role: RoleName = setting(...)
    """viewer: may read. operator: may also change."""


class ApiLimitSettings(SettingsSection):
    """A caller over a limit gets the status 503 (connections) or 429 (requests)."""

    connections: int = setting(512, takes_effect="restart", ge=8, le=65_536)
    """Maximum number of concurrent connections."""
    unauthenticated_requests_per_second: int = setting(20, ge=1, le=100_000)
    """Maximum number of requests per second from one address (IPv6: from one /64) without a valid token or
    certificate. Bursts of five times as many are allowed. Requests with a valid token or certificate are not
    limited."""


class ApiSettings(SettingsSection):
    """The REST API and the console. Callers are authenticated only if `tokens` or `clients` are set."""

    listen: ListenAddress = setting("127.0.0.1:3080", takes_effect="restart")
    """Address of the REST server."""
    tls: ApiTls | None = setting(None, takes_effect="restart")
    """TLS of the REST server; default: no TLS."""
    tokens: tuple[ApiTokenSettings, ...] = setting((), max_length=_MAX_CALLERS)
    """Tokens that callers may send; `tidevoy token create` creates one."""
    clients: tuple[ApiClientSettings, ...] = setting((), max_length=_MAX_CALLERS)
    """Callers identified by a certificate of api.tls.client_ca."""
    allow_cleartext_tokens: bool = setting(False, takes_effect="restart")
    """Allow tokens without TLS on addresses other than loopback. Anyone who can read the traffic can use
    them."""
    host_names: tuple[HostName, ...] = setting((), max_length=_MAX_CALLERS)
    """Host names that callers may use for a REST server without authentication. IP addresses, names without a
    dot, and the host of `listen` are always allowed. Requests with another `Host` are rejected to prevent DNS
    rebinding: a web site points its own name to this server, and calls it through an operator's browser."""
    trusted_proxies: tuple[Cidr, ...] = setting((), takes_effect="restart", max_length=_MAX_CALLERS)
    """Networks of reverse proxies. X-Forwarded-For and X-Forwarded-Proto are used only in requests from them.
    The client's address is the last address in X-Forwarded-For that is not in these networks."""
    open_metrics: bool = setting(False)
    """Allow reading /metrics without a token or certificate."""
    limits: ApiLimitSettings = section(ApiLimitSettings, "Limits of the REST server.")

    @property
    def requires_auth(self) -> bool:
        return bool(self.tokens or self.clients)

    @model_validator(mode="after")
    def _check_unique_callers(self) -> ApiSettings:
        for key, callers in (("tokens", self.tokens), ("clients", self.clients)):
            names = [caller.name for caller in callers]
            reject_duplicates(f"{key}.{{}}.name", names, "give each its own name")
        hashes = [token.sha256.get_secret_value() for token in self.tokens]
        for index, sha256 in enumerate(hashes):
            if sha256 in hashes[:index]:
                raise SettingError(
                    "two callers have the same token", "create a token for each", key=f"tokens.{index}.sha256"
                )
        return self

    @model_validator(mode="after")
    def _check_clients_have_ca(self) -> ApiSettings:
        requests_certificates = self.tls is not None and self.tls.client_ca is not None
        if self.clients and not requests_certificates:
            raise SettingError(
                "are set, but clients are not asked for a certificate", "set api.tls.client_ca", key="clients"
            )
        if requests_certificates and not self.requires_auth:
            raise SettingError(
                "is set, but no client is authorized",
                "list the authorized certificates in api.clients",
                key="tls.client_ca",
            )
        return self

    def exposure_problem(self) -> tuple[str, str] | None:
        """Return (problem, remedy) if listening beyond loopback is unsafe, else None."""
        if not self.requires_auth:
            return (
                "can be reached from other machines, and the REST server does not authenticate callers",
                "set api.tokens and api.tls, listen on 127.0.0.1, or set allow_unauthenticated: true if the"
                " network itself restricts access",
            )
        if self.tls is None and not self.allow_cleartext_tokens:
            return (
                "can be reached from other machines, and tokens would be sent in clear text",
                "set api.tls, listen on 127.0.0.1, or set api.allow_cleartext_tokens: true if a proxy in"
                " front terminates TLS",
            )
        return None

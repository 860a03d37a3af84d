"""The section `api`: authentication, TLS and rate limits of the REST API.

Tokens are stored as SHA-256 only. They are random (`tidevoy token create`), so a leaked hash does not reveal
a token.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, SecretStr, model_validator

from controlplane import address as addresses
from controlplane.config.types import (
    File,
    ListenAddress,
    SettingError,
    SettingsSection,
    ValueFormat,
    required,
    section,
    setting,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CALLER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/:*-]{0,127}")
_ANONYMOUS = "anonymous"  # name of unauthenticated callers in audit events
_MAX_CALLERS = 256  # tokens or clients; each one is compared with each request


def _validate_sha256(value: SecretStr) -> SecretStr:
    if not _SHA256.fullmatch(value.get_secret_value()):
        raise SettingError(  # not shown: it may be the token itself
            "this is not a SHA-256 hash",
            "write the 64 characters (0-9, a-f) that `tidevoy token create` prints",
        )
    return value


def _validate_caller_name(value: str) -> str:
    if not _CALLER_NAME.fullmatch(value):
        raise SettingError(
            "this is not a valid caller name",
            "write up to 128 letters, digits and . _ @ / : * -, beginning with a letter or digit",
        )
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
    str, AfterValidator(_validate_caller_name), ValueFormat("a name, such as anna or ci.example.org")
]
HostName = Annotated[
    str, AfterValidator(_validate_host_name), ValueFormat("a host name, such as tidevoy.example.org")
]
RoleName = Literal["viewer", "operator"]


class ApiTls(SettingsSection):
    """TLS of the REST server. The files are read again when they change."""

    cert: File = required("Server certificate (PEM, with its chain).", "restart")
    key: File = required("Private key (PEM) of that certificate.", "restart")
    client_ca: File | None = setting(
        None,
        "CA (PEM) of client certificates. Without api.tokens every client needs a certificate; with them, a"
        " certificate or a token.",
        "restart",
    )


class ApiTokenSettings(SettingsSection):
    """A token that callers send as `Authorization: Bearer ...`."""

    name: CallerName = required("Name of the caller in audit events.", "now")
    role: RoleName = required("viewer: may read. operator: may also change.", "now")
    sha256: Sha256 = required("SHA-256 of the token, in hexadecimal.", "now")


class ApiClientSettings(SettingsSection):
    """A caller identified by its client certificate."""

    name: CallerName = required(
        "A DNS name, URI or e-mail address among the certificate's subject alternative names, or its common"
        " name if it has none.",
        "now",
    )
    role: RoleName = required("viewer: may read. operator: may also change.", "now")


class ApiLimitSettings(SettingsSection):
    """Limits per caller of the REST server. Excess requests are rejected without effect on other callers."""

    connections: int = setting(512, "Maximum number of concurrent connections.", "now", ge=8, le=65_536)
    connections_per_source: int = setting(
        64,
        "Maximum number of concurrent connections from one address (IPv6: from one /64).",
        "now",
        ge=4,
        le=65_536,
    )
    requests_per_second: int = setting(
        200,
        "Requests per second of one caller; bursts of five times as many are allowed.",
        "now",
        ge=1,
        le=100_000,
    )
    refusals_per_second: int = setting(
        2,
        "Requests per second from one address without a valid token or certificate; bursts of fifteen times"
        " as many are allowed. An address that exceeds this is blocked for ten seconds, and longer each"
        " time, up to a minute.",
        "now",
        ge=1,
        le=100_000,
    )


class ApiSettings(SettingsSection):
    """REST and console. Callers are authenticated only if `tokens` or `clients` are set."""

    listen: ListenAddress = setting("127.0.0.1:3080", "Address of the REST server.", "restart")
    tls: ApiTls | None = setting(None, "TLS of the REST server; default: no TLS.", "restart")
    tokens: tuple[ApiTokenSettings, ...] = setting(
        (),
        "Tokens that callers may send; `tidevoy token create` creates one.",
        "now",
        max_length=_MAX_CALLERS,
    )
    clients: tuple[ApiClientSettings, ...] = setting(
        (), "Callers identified by a certificate of api.tls.client_ca.", "now", max_length=_MAX_CALLERS
    )
    allow_cleartext_tokens: bool = setting(
        False,
        "Allow tokens on other addresses than loopback without TLS, where anyone who sees the traffic can use"
        " them.",
        "restart",
    )
    host_names: tuple[HostName, ...] = setting(
        (),
        "Host names under which the REST server is used without authentication, besides IP addresses, names"
        " without a dot, and that of `listen`. Requests with another `Host` are rejected: a foreign web site"
        " could otherwise point its own name to this server and call it through an operator's browser (DNS"
        " rebinding).",
        "now",
        max_length=_MAX_CALLERS,
    )
    open_metrics: bool = setting(False, "Allow reading /metrics without a token or certificate.", "now")
    limits: ApiLimitSettings = section(ApiLimitSettings, "Request limits.")

    @property
    def requires_auth(self) -> bool:
        """Whether callers must authenticate."""
        return bool(self.tokens or self.clients)

    @model_validator(mode="after")
    def _check_unique_callers(self) -> ApiSettings:
        for key, names in (
            ("tokens", [token.name for token in self.tokens]),
            ("clients", [client.name for client in self.clients]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise SettingError(
                        f"{name} is listed twice", "give each its own name", key=f"{key}.{index}.name"
                    )
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

    def exposure_problem(self) -> tuple[str, str, str] | None:
        """Return (key, problem, remedy) if listening beyond loopback is unsafe, else None."""
        if not self.requires_auth:
            return (
                "listen",
                "can be reached from other machines, and the REST server does not authenticate callers",
                "set api.tokens and api.tls, listen on 127.0.0.1, or set allow_unauthenticated: true if the"
                " network itself restricts access",
            )
        if self.tls is None and not self.allow_cleartext_tokens:
            return (
                "listen",
                "can be reached from other machines, and tokens would be sent in clear text",
                "set api.tls, listen on 127.0.0.1, or set api.allow_cleartext_tokens: true if a proxy in"
                " front terminates TLS",
            )
        return None

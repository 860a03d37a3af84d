"""Who may call the REST API, over what, and how much of it: the section `api`.

Tokens are known by their SHA-256 alone. They are random (`tidevoy token create`), so nobody finds one for a
hash, and a hash that is read by somebody opens nothing.
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
_ANONYMOUS = "anonymous"  # audit events name callers so who are not known
_MAX_CALLERS = 256  # tokens or clients; each is compared with each that comes


def _validate_sha256(value: SecretStr) -> SecretStr:
    if not _SHA256.fullmatch(value.get_secret_value()):
        raise SettingError(  # not shown: somebody may have written the token itself
            "this is no SHA-256",
            "write the 64 characters (0-9, a-f) that `tidevoy token create` prints",
        )
    return value


def _validate_caller_name(value: str) -> str:
    if not _CALLER_NAME.fullmatch(value):
        raise SettingError(
            "this is no name of a caller",
            "write up to 128 letters, digits and . _ @ / : * -, the first one a letter or digit",
        )
    if value == _ANONYMOUS:
        raise SettingError(f"audit events call those {_ANONYMOUS} who are not known", "choose another name")
    return value


def _validate_host_name(value: str) -> str:
    try:
        return addresses.split(f"{value}:1")[0].lower()
    except ValueError:
        raise SettingError(
            f"{value!r} is no host name", "leave out scheme and port, as in tidevoy.example.org"
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
    """How the REST server presents itself. The files are read again when they change."""

    cert: File = required("Its certificate (PEM, with its chain).", "restart")
    key: File = required("The key (PEM) of that certificate.", "restart")
    client_ca: File | None = setting(
        None,
        "CA (PEM) of client certificates. Without api.tokens each client needs one; with them, one or the"
        " other.",
        "restart",
    )


class ApiTokenSettings(SettingsSection):
    """A token that callers send as `Authorization: Bearer ...`."""

    name: CallerName = required("Who has it; audit events name the caller so.", "now")
    role: RoleName = required("viewer: reads. operator: also changes.", "now")
    sha256: Sha256 = required("SHA-256 of the token, in hexadecimal.", "now")


class ApiClientSettings(SettingsSection):
    """A caller known by its certificate."""

    name: CallerName = required(
        "A DNS name, URI or e-mail address among the certificate's alternative names; of a certificate"
        " without any, its common name.",
        "now",
    )
    role: RoleName = required("viewer: reads. operator: also changes.", "now")


class ApiLimitSettings(SettingsSection):
    """How much callers may ask of the REST server. What goes beyond is refused, and nobody else notices."""

    connections: int = setting(512, "Connections at a time.", "now", ge=8, le=65_536)
    connections_per_source: int = setting(
        64,
        "Connections at a time from one address (IPv6: from one /64).",
        "now",
        ge=4,
        le=65_536,
    )
    requests_per_second: int = setting(
        200, "Requests a second of one caller; five times as many at once.", "now", ge=1, le=100_000
    )
    refusals_per_second: int = setting(
        2,
        "Requests a second without a right token or certificate from one address; fifteen times as many at"
        " once. An address that has more is shut out for ten seconds, and each time for longer, up to a"
        " minute.",
        "now",
        ge=1,
        le=100_000,
    )


class ApiSettings(SettingsSection):
    """REST and console. Nobody is asked who is calling unless there are `tokens` or `clients`."""

    listen: ListenAddress = setting("127.0.0.1:3080", "Address of the REST server.", "restart")
    tls: ApiTls | None = setting(None, "TLS of the REST server; default: plain.", "restart")
    tokens: tuple[ApiTokenSettings, ...] = setting(
        (), "Tokens that callers may send; `tidevoy token create` makes one.", "now", max_length=_MAX_CALLERS
    )
    clients: tuple[ApiClientSettings, ...] = setting(
        (), "Callers known by a certificate of api.tls.client_ca.", "now", max_length=_MAX_CALLERS
    )
    allow_cleartext_tokens: bool = setting(
        False,
        "Let tokens be sent beyond loopback without TLS, where whoever sees the traffic can use them.",
        "restart",
    )
    host_names: tuple[HostName, ...] = setting(
        (),
        "Names by which the REST server is called where nobody is asked who is calling, beside IP addresses,"
        " names without a dot, and that of `listen`. Requests with another name in `Host` are refused:"
        " whoever owns one could let it lead here, and use the browsers of those who may call.",
        "now",
        max_length=_MAX_CALLERS,
    )
    open_metrics: bool = setting(False, "Let /metrics be read without a token or certificate.", "now")
    limits: ApiLimitSettings = section(ApiLimitSettings, "How much callers may ask.")

    @property
    def requires_auth(self) -> bool:
        """Whether callers have to say who they are."""
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
                        f"{name} stands there twice", "give each its own name", key=f"{key}.{index}.name"
                    )
        hashes = [token.sha256.get_secret_value() for token in self.tokens]
        for index, sha256 in enumerate(hashes):
            if sha256 in hashes[:index]:
                raise SettingError(
                    "two callers have the same token", "make a token for each", key=f"tokens.{index}.sha256"
                )
        return self

    @model_validator(mode="after")
    def _check_clients_have_ca(self) -> ApiSettings:
        requests_certificates = self.tls is not None and self.tls.client_ca is not None
        if self.clients and not requests_certificates:
            raise SettingError(
                "are set, but nobody is asked for a certificate", "set api.tls.client_ca", key="clients"
            )
        if requests_certificates and not self.requires_auth:
            raise SettingError(
                "is set, but no certificate is known",
                "name those that may call in api.clients",
                key="tls.client_ca",
            )
        return self

    def exposure_problem(self) -> tuple[str, str, str] | None:
        """Why this may not be reached from other machines: (key, problem, remedy); None when it may."""
        if not self.requires_auth:
            return (
                "listen",
                "can be reached from other machines, and the REST server does not ask who is calling",
                "set api.tokens and api.tls, listen on 127.0.0.1, or set allow_unauthenticated: true when"
                " the network keeps others out",
            )
        if self.tls is None and not self.allow_cleartext_tokens:
            return (
                "listen",
                "can be reached from other machines, and tokens would be sent there in clear text",
                "set api.tls, listen on 127.0.0.1, or set api.allow_cleartext_tokens: true when something"
                " before it does TLS",
            )
        return None

"""Who may call the REST API, over what, and how much of it: the section `api`.

Tokens are known by their SHA-256 alone. They are random (`tidevoy token create`), so nobody finds one for a
hash, and a hash that is read by somebody opens nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, SecretStr, model_validator

from controlplane import address as addresses
from controlplane.config.types import File, Form, Listen, Section, Wrong, required, section, setting

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/:*-]{0,127}")
_NOBODY = "anonymous"  # audit events name callers so who are not known
_MOST = 256  # tokens or clients; each is compared with each that comes


def _sha256(value: SecretStr) -> SecretStr:
    if not _SHA256.fullmatch(value.get_secret_value()):
        raise Wrong(  # not shown: somebody may have written the token itself
            "this is no SHA-256",
            "write the 64 characters (0-9, a-f) that `tidevoy token create` prints",
        )
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise Wrong(
            "this is no name of a caller",
            "write up to 128 letters, digits and . _ @ / : * -, the first one a letter or digit",
        )
    if value == _NOBODY:
        raise Wrong(f"audit events call those {_NOBODY} who are not known", "choose another name")
    return value


def _host_name(value: str) -> str:
    try:
        return addresses.split(f"{value}:1")[0].lower()
    except ValueError:
        raise Wrong(
            f"{value!r} is no host name", "leave out scheme and port, as in tidevoy.example.org"
        ) from None


Sha256 = Annotated[SecretStr, AfterValidator(_sha256), Form("64 characters, 0-9 and a-f")]
CallerName = Annotated[str, AfterValidator(_name), Form("a name, such as anna or ci.example.org")]
HostName = Annotated[str, AfterValidator(_host_name), Form("a host name, such as tidevoy.example.org")]
RoleName = Literal["viewer", "operator"]


class ApiTls(Section):
    """How the REST server presents itself. The files are read again when they change."""

    cert: File = required("Its certificate (PEM, with its chain).", "restart")
    key: File = required("The key (PEM) of that certificate.", "restart")
    client_ca: File | None = setting(
        None,
        "CA (PEM) of client certificates. Without api.tokens each client needs one; with them, one or the"
        " other.",
        "restart",
    )


class Token(Section):
    """A token that callers send as `Authorization: Bearer ...`."""

    name: CallerName = required("Who has it; audit events name the caller so.", "now")
    role: RoleName = required("viewer: reads. operator: also changes.", "now")
    sha256: Sha256 = required("SHA-256 of the token, in hexadecimal.", "now")


class Client(Section):
    """A caller known by its certificate."""

    name: CallerName = required(
        "A DNS name, URI or e-mail address among the certificate's alternative names; of a certificate"
        " without any, its common name.",
        "now",
    )
    role: RoleName = required("viewer: reads. operator: also changes.", "now")


class Limits(Section):
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


class Api(Section):
    """REST and console. Nobody is asked who is calling unless there are `tokens` or `clients`."""

    listen: Listen = setting("127.0.0.1:3080", "Address of the REST server.", "restart")
    tls: ApiTls | None = setting(None, "TLS of the REST server; default: plain.", "restart")
    tokens: tuple[Token, ...] = setting(
        (), "Tokens that callers may send; `tidevoy token create` makes one.", "now", max_length=_MOST
    )
    clients: tuple[Client, ...] = setting(
        (), "Callers known by a certificate of api.tls.client_ca.", "now", max_length=_MOST
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
        max_length=_MOST,
    )
    open_metrics: bool = setting(False, "Let /metrics be read without a token or certificate.", "now")
    limits: Limits = section(Limits, "How much callers may ask.")

    @property
    def asks(self) -> bool:
        """Whether callers have to say who they are."""
        return bool(self.tokens or self.clients)

    @model_validator(mode="after")
    def _callers_once(self) -> Api:
        for key, names in (
            ("tokens", [token.name for token in self.tokens]),
            ("clients", [client.name for client in self.clients]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise Wrong(
                        f"{name} stands there twice", "give each its own name", key=f"{key}.{index}.name"
                    )
        hashes = [token.sha256.get_secret_value() for token in self.tokens]
        for index, sha256 in enumerate(hashes):
            if sha256 in hashes[:index]:
                raise Wrong(
                    "two callers have the same token", "make a token for each", key=f"tokens.{index}.sha256"
                )
        return self

    @model_validator(mode="after")
    def _clients_can_come(self) -> Api:
        asked = self.tls is not None and self.tls.client_ca is not None
        if self.clients and not asked:
            raise Wrong(
                "are set, but nobody is asked for a certificate", "set api.tls.client_ca", key="clients"
            )
        if asked and not self.asks:
            raise Wrong(
                "is set, but no certificate is known",
                "name those that may call in api.clients",
                key="tls.client_ca",
            )
        return self

    def hazard(self) -> tuple[str, str, str] | None:
        """Why this may not be reached from other machines: (key, problem, remedy); None when it may."""
        if not self.asks:
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

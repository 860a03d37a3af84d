"""TLS of SQL traffic on both sides of the Envoys. It needs Tidevoy's module.

The files are on the Envoys' machines, where the control plane cannot check them: the module reads them,
reads them again when they change. If it cannot use them, it reports that (`config_rejection` of the Envoy).
An Envoy that starts then gets no listener with the module; a running one keeps the TLS settings that it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from controlplane.config.types import (
    SettingError,
    SettingsSection,
    ValueFormat,
    section,
    setting,
    validate_envoy_path,
)

EnvoyFile = Annotated[
    Path,
    AfterValidator(validate_envoy_path),
    ValueFormat("an absolute path on the Envoys' machines, such as /etc/tidevoy/server.pem"),
]


TlsVersion = Literal["TLSv1.2", "TLSv1.3"]


class SqlClientTls(SettingsSection):
    """An Envoy without the module gets no listener while `mode` is `required`.

    In the other modes, it forwards all bytes, and clients negotiate TLS with TiDB itself.
    """

    mode: Literal["disabled", "optional", "required"] = setting("disabled")
    """`optional` offers TLS to clients; `required` rejects logins without TLS."""
    cert: EnvoyFile | None = setting(None)
    """Certificate (PEM, with its chain) that clients see."""
    key: EnvoyFile | None = setting(None)
    """Private key (PEM) of that certificate."""
    client_ca: EnvoyFile | None = setting(None)
    """CA (PEM) that client certificates must chain to; if set, TLS clients need a certificate."""
    crl: EnvoyFile | None = setting(None)
    """Certificate revocation lists (PEM) for client certificates: one of each CA in their chains. A list
    remains valid after its `nextUpdate`."""
    min_version: TlsVersion = setting("TLSv1.2")
    """Oldest version of TLS that clients may use."""
    rsa_key: EnvoyFile | None = setting(None)
    """RSA key (PEM) with which a client without TLS encrypts its password when the connection to TiDB uses
    TLS; default: each Envoy generates one when it starts."""

    @model_validator(mode="after")
    def _check_complete(self) -> SqlClientTls:
        if self.mode == "disabled":
            _reject_unused_files(
                {"cert": self.cert, "key": self.key, "client_ca": self.client_ca, "crl": self.crl},
                "optional or required",
            )
        elif self.cert is None or self.key is None:
            missing = "cert" if self.cert is None else "key"
            raise SettingError(f"is {self.mode}, but {missing} is not set", f"set {missing} too", key="mode")
        elif self.crl is not None and self.client_ca is None:
            raise SettingError("is set, but client_ca is not", "set client_ca too, or remove crl", key="crl")
        return self


class NodeTls(SettingsSection):
    """An Envoy without the module gets no listener while `mode` is `required`."""

    mode: Literal["disabled", "preferred", "required"] = setting("disabled")
    """`preferred` uses TLS with nodes that offer it; `required` uses only nodes that offer it."""
    ca: EnvoyFile | None = setting(None)
    """CA bundle (PEM) that the nodes' certificates must chain to; default: the system's."""
    verify: Literal["full", "ca", "none"] = setting("full")
    """Verification of a node's certificate. full: CA and name; ca: only the CA; none: nothing."""
    crl: EnvoyFile | None = setting(None)
    """Certificate revocation lists (PEM) for the nodes' certificates: one of each CA in their chains. A list
    remains valid after its `nextUpdate`."""
    min_version: TlsVersion = setting("TLSv1.2")
    """Oldest version of TLS that nodes may use."""
    cert: EnvoyFile | None = setting(None)
    """The Envoys' client certificate (PEM), for nodes that require one."""
    key: EnvoyFile | None = setting(None)
    """Private key (PEM) of that certificate."""

    @model_validator(mode="after")
    def _check_complete(self) -> NodeTls:
        if self.mode == "disabled":
            _reject_unused_files(
                {"ca": self.ca, "crl": self.crl, "cert": self.cert, "key": self.key}, "preferred or required"
            )
        if (self.cert is None) != (self.key is None):
            alone, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise SettingError(f"is set without {missing}", f"set {missing} too, or neither", key=alone)
        for key, file in {"ca": self.ca, "crl": self.crl}.items():
            if file is not None and self.verify == "none":
                raise SettingError(
                    "is set, but verify is none", f"set verify: full or verify: ca, or remove {key}", key=key
                )
        return self


def _reject_unused_files(files: dict[str, Path | None], modes: str) -> None:
    """Raise SettingError if a file is set although TLS is off: the operator expects TLS."""
    for key, file in files.items():
        if file is not None:
            raise SettingError("is set, but mode is disabled", f"set mode: {modes}, or remove {key}", key=key)


class SqlTlsSettings(SettingsSection):
    """TLS of SQL traffic needs Tidevoy's module in the Envoys.

    All files are on the Envoys' machines. Envoys read them again when they change, without ending sessions.
    """

    client: SqlClientTls = section(SqlClientTls, "TLS between SQL clients and Envoys.")
    backend: NodeTls = section(NodeTls, "TLS between Envoys and TiDB.")
    allow_cleartext_backend: bool = setting(False)
    """Allow Envoys to forward a clear-text password, which they received over TLS, to a node without TLS.
    Accounts with caching_sha2_password need this if only the client's side uses TLS."""

    @property
    def required_sides(self) -> list[str]:
        """The sides that must have TLS: `client` and `backend`."""
        sides = (("client", self.client.mode), ("backend", self.backend.mode))
        return [side for side, mode in sides if mode == "required"]

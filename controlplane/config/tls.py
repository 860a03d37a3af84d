"""TLS of SQL traffic on both sides of the Envoys. It needs Tidevoy's module; the files are on the Envoys.

The control plane cannot check these files: the module reads them, rejects unusable ones with an error that
shows as a NACK, and reads them again when they change.
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


class SqlClientTls(SettingsSection):
    """An Envoy without the module gets no listener while `mode` is `required`.

    Otherwise it passes TLS through, and clients negotiate it with TiDB itself.
    """

    mode: Literal["disabled", "optional", "required"] = setting(
        "disabled",
        "`optional` offers TLS to clients; `required` rejects logins without TLS.",
        "new envoys",
    )
    cert: EnvoyFile | None = setting(
        None, "Certificate (PEM, with its chain) that clients see.", "new envoys"
    )
    key: EnvoyFile | None = setting(None, "Private key (PEM) of that certificate.", "new envoys")
    client_ca: EnvoyFile | None = setting(
        None,
        "CA (PEM) that client certificates must chain to; if set, TLS clients need a certificate.",
        "new envoys",
    )
    rsa_key: EnvoyFile | None = setting(
        None,
        "RSA key (PEM) with which a client without TLS encrypts its password when the connection to TiDB uses"
        " TLS; default: each Envoy generates one when it starts.",
        "new envoys",
    )

    @model_validator(mode="after")
    def _check_complete(self) -> SqlClientTls:
        if self.mode == "disabled":
            _reject_unused_files(
                {"cert": self.cert, "key": self.key, "client_ca": self.client_ca}, "optional or required"
            )
        elif self.cert is None or self.key is None:
            missing = "cert" if self.cert is None else "key"
            raise SettingError(f"is {self.mode}, but {missing} is not set", f"set {missing} too", key="mode")
        return self


class NodeTls(SettingsSection):
    """An Envoy without the module gets no listener while `mode` is `required`."""

    mode: Literal["disabled", "preferred", "required"] = setting(
        "disabled",
        "`preferred` uses TLS with nodes that offer it; `required` uses only nodes that offer it.",
        "new envoys",
    )
    ca: EnvoyFile | None = setting(
        None,
        "CA bundle (PEM) that the nodes' certificates must chain to; default: the system's.",
        "new envoys",
    )
    verify: Literal["full", "ca", "none"] = setting(
        "full",
        "What is verified of a node's certificate: CA and name, only the CA, or nothing.",
        "new envoys",
    )
    cert: EnvoyFile | None = setting(
        None, "The Envoys' client certificate (PEM), for nodes that require one.", "new envoys"
    )
    key: EnvoyFile | None = setting(None, "Private key (PEM) of that certificate.", "new envoys")

    @model_validator(mode="after")
    def _check_complete(self) -> NodeTls:
        if self.mode == "disabled":
            _reject_unused_files({"ca": self.ca, "cert": self.cert, "key": self.key}, "preferred or required")
        if (self.cert is None) != (self.key is None):
            alone, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise SettingError(f"is set without {missing}", f"set {missing} too, or neither", key=alone)
        if self.ca is not None and self.verify == "none":
            raise SettingError(
                "is set, but verify is none", "set verify: full or verify: ca, or remove ca", key="ca"
            )
        return self


def _reject_unused_files(files: dict[str, Path | None], modes: str) -> None:
    """Raise SettingError if a file is set although TLS is off: the operator expects that it is used."""
    for key, file in files.items():
        if file is not None:
            raise SettingError("is set, but mode is disabled", f"set mode: {modes}, or remove {key}", key=key)


class SqlTlsSettings(SettingsSection):
    """TLS of SQL traffic needs Tidevoy's module in the Envoys.

    All files are on the Envoys' machines. Envoys read them again when they change, without ending sessions.
    """

    client: SqlClientTls = section(SqlClientTls, "TLS between SQL clients and Envoys.")
    backend: NodeTls = section(NodeTls, "TLS between Envoys and TiDB.")
    allow_cleartext_backend: bool = setting(
        False,
        "Forward a password that a client sends in clear text over TLS to a node without TLS. Accounts with"
        " caching_sha2_password need this if only the client's side uses TLS.",
        "new envoys",
    )

    @property
    def tls_requirement(self) -> str:
        """The settings that forbid Envoys without the module, as the start of a sentence; empty: none."""
        sides = (("client", self.client.mode), ("backend", self.backend.mode))
        return " and ".join(
            f"tls.{side}.mode is set to required" for side, mode in sides if mode == "required"
        )

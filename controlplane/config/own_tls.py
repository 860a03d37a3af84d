"""TLS of Tidevoy's own connections: as a client of PD and of the nodes, and as a server.

This is a separate module because programs that only connect to etcd start faster without the other settings.
"""

from __future__ import annotations

from pydantic import model_validator

from controlplane.config.types import File, SettingError, SettingsSection, setting


class ClientTls(SettingsSection):
    """The client certificate and its key must be set together."""

    ca: File | None = setting(None, takes_effect="restart")
    """CA bundle (PEM) that the server's certificate must chain to; default: the system's."""
    cert: File | None = setting(None, takes_effect="restart")
    """Tidevoy's client certificate (PEM), for mutual TLS."""
    key: File | None = setting(None, takes_effect="restart")
    """Private key (PEM) of the certificate."""

    @model_validator(mode="after")
    def _check_cert_has_key(self) -> ClientTls:
        if (self.cert is None) != (self.key is None):
            alone, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise SettingError(f"is set without {missing}", f"set {missing} too, or neither", key=alone)
        return self


class ServerTls(SettingsSection):
    """TLS of Tidevoy as a server."""

    cert: File = setting(..., takes_effect="restart")
    """Tidevoy's server certificate (PEM)."""
    key: File = setting(..., takes_effect="restart")
    """Private key (PEM) of the certificate."""
    client_ca: File | None = setting(None, takes_effect="restart")
    """CA (PEM) that client certificates must chain to; if set, clients need a certificate."""


class XdsTls(ServerTls):
    """The files are checked every second for changes; new connections use the new certificates."""

    verify_node_id: bool = setting(True)
    """Whether an Envoy's client certificate must contain the Envoy's id: as a DNS name, as the last path
    segment of a URI (percent-encoded), or, without such names, as common name. If false, any certificate of
    `client_ca` is accepted."""

    @model_validator(mode="after")
    def _check_verification_has_client_ca(self) -> XdsTls:
        if "verify_node_id" in self.model_fields_set and self.client_ca is None:
            raise SettingError(
                "is set, but without client_ca no client sends a certificate",
                "set client_ca too, or remove verify_node_id",
                key="verify_node_id",
            )
        return self

"""The certificates of the xDS port, reloaded when their files change.

gRPC asks for the certificates at each new connection; open connections are not affected.

A client that resumes a TLS session sends no certificate, so a client with an expired certificate would be
accepted for days. So gRPC gets the same certificates again every minute, which invalidates session tickets.
"""

from __future__ import annotations

import grpc

from controlplane.clock import Clock
from controlplane.config.own_tls import ServerTls
from controlplane.config.reloading_certificates import OnEvent, ReloadingCertificates

_SESSION_TICKET_SECONDS = 60.0  # a TLS session can be resumed for this long


class ServerCertificates(ReloadingCertificates[grpc.ServerCertificateConfiguration]):
    """The certificates for new connections. All methods except `_fetch` run on one event loop."""

    def __init__(self, tls: ServerTls, clock: Clock, on_event: OnEvent) -> None:
        """Raises ConfigError if the files are unusable."""
        super().__init__(("xds", "tls"), tls, lambda: _load(tls), clock, on_event)
        self._requires_certificate = tls.client_ca is not None
        self._served, self._served_at = self.current(), clock()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials to open a port with."""
        return grpc.dynamic_ssl_server_credentials(self._served, self._fetch, self._requires_certificate)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if gRPC must load them, else None. gRPC calls this in other threads."""
        certificates, now = self.current(), self._clock()
        if certificates is self._served and now < self._served_at + _SESSION_TICKET_SECONDS:
            return None
        self._served, self._served_at = certificates, now
        return certificates


def _load(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.cert.read_bytes())], ca)

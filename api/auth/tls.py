"""TLS of the REST server: its context, and the names in the client certificates of its connections."""

from __future__ import annotations

import asyncio
import ssl

from uvicorn.protocols.http.h11_impl import H11Protocol

from api.auth.credentials import certificate_names
from controlplane.config.api import ApiSettings, ApiTls


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which also passes the names in the client certificate to the app."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # At the limit of connections, uvicorn would reject the requests on all connections. These lines make
        # it reject only the requests on connections beyond the limit.
        if self.limit_concurrency is not None:
            self.limit_concurrency = 0 if len(self.connections) > self.limit_concurrency else None
        tls = transport.get_extra_info("ssl_object")
        names = certificate_names(tls.getpeercert() if tls is not None else None)
        # uvicorn copies the state into the scope of each request, where the middleware reads the names.
        self.app_state = {"certificate_names": names}


def load_server_context(files: ApiTls) -> ssl.SSLContext:
    """Load the context for new connections. Raises OSError if a file is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["http/1.1"])
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
    return context


def client_verify_mode(api: ApiSettings) -> ssl.VerifyMode:
    """Return whether clients must present a certificate. If tokens are configured, a token suffices."""
    if api.tls is None or api.tls.client_ca is None:
        return ssl.CERT_NONE
    return ssl.CERT_OPTIONAL if api.tokens else ssl.CERT_REQUIRED

"""TLS client context for status ports of nodes and for Prometheus. It is reloaded if its files change."""

from __future__ import annotations

import ssl

from controlplane.clock import Clock
from controlplane.config.own_tls import ClientTls
from controlplane.config.reloading_certificates import OnEvent, ReloadingCertificates
from controlplane.config.schema import SettingPath


class ReloadingClientContext(ReloadingCertificates[ssl.SSLContext]):
    """A context that presents our client certificate, if one is configured."""

    def __init__(self, tls: ClientTls, path: SettingPath, clock: Clock, on_event: OnEvent) -> None:
        """`path`: the path of `tls` in the settings. Raises ConfigError if the files are unusable."""
        super().__init__(path, tls, lambda: _load(tls), clock, on_event)


def _load(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context

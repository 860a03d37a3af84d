"""The certificates of the xDS port, reloaded when their files change: no restart, and no stream ends.

gRPC asks for the certificates at each new connection; open connections keep those they started with.

A client that resumes a TLS session sends no certificate, so one that has expired meanwhile would stay
accepted for days. Giving gRPC the certificates again invalidates the tickets of all earlier sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from controlplane.clock import Clock
from controlplane.config import certificate_checks
from controlplane.config.settings import ServerTls

_CHECK_INTERVAL_SECONDS = 1.0  # between two checks of the files
_SESSION_TICKET_SECONDS = 60.0  # a TLS session can be resumed for this long
# After this long, unusable files are reported again: the old certificates will expire, and the metrics show
# only the expiry of those in the files.
_REMINDER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _CertificateFiles:
    """Contents of the files, as PEM."""

    key: bytes
    cert: bytes
    client_ca: bytes | None

    def to_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class ServerCertificates:
    """The certificates for new connections. All methods but gRPC's callback run on one event loop."""

    def __init__(self, tls: ServerTls, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        """`on_event` gets kind, subject and message. Raises OSError if a file cannot be read."""
        self._tls = tls
        self._clock = clock
        self._on_event = on_event
        self._loaded = self._served = _read_files(tls)
        self._served_at = clock()
        self._problem = ""  # with the files, at the latest check
        self._reported_problem, self._reported_at = "", 0.0

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials to open a port with."""
        return grpc.dynamic_ssl_server_credentials(
            self._served.to_grpc(), self._fetch, self._tls.client_ca is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if gRPC must replace them, else None. gRPC calls this in other threads."""
        files, now = self._loaded, self._clock()
        if files is self._served and now < self._served_at + _SESSION_TICKET_SECONDS:
            return None
        self._served, self._served_at = files, now
        return files.to_grpc()

    async def watch(self) -> None:
        """Check the files periodically until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Load the files if they have changed and are valid; else the old certificates stay in use."""
        loaded = await asyncio.to_thread(_load_if_valid, self._tls, self._loaded)
        if isinstance(loaded, str):
            # Certificate and key are two files that do not match between the two renames, so a problem is
            # reported only when it persists.
            now = self._clock()
            if loaded == self._problem and (
                loaded != self._reported_problem or now >= self._reported_at + _REMINDER_SECONDS
            ):
                self._reported_problem, self._reported_at = loaded, now
                self._on_event(
                    "xds.certificates_rejected", "xds.tls", f"the old certificates stay in use: {loaded}"
                )
            self._problem = loaded
            return
        if loaded is not None:
            self._loaded = loaded
            self._on_event(
                "xds.certificates_reloaded", "xds.tls", "new connections from Envoys get the new certificates"
            )
        self._problem = self._reported_problem = ""


def _load_if_valid(tls: ServerTls, current: _CertificateFiles) -> _CertificateFiles | str | None:
    """Return the new contents of the files, None if unchanged, or a text that says why they are unusable."""
    try:
        loaded = _read_files(tls)
        if loaded == current:
            return None
        if faults := certificate_checks.check_section(("xds", "tls"), tls):
            return "; ".join(f"{fault.problem}; {fault.remedy}" for fault in faults)
        # The check reads the files itself: accept them only if they did not change meanwhile.
        return loaded if _read_files(tls) == loaded else None
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _read_files(tls: ServerTls) -> _CertificateFiles:
    ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return _CertificateFiles(tls.key.read_bytes(), tls.cert.read_bytes(), ca)

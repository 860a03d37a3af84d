"""The certificate files of the xDS port, read again when they change: no restart, and no stream ends.

Certificates come to their end at night. gRPC asks for them at each new connection; those that are open go on
with what they began with.

Whoever resumes a TLS session shows no certificate again, so one that has ended meanwhile would be good for
days more. Giving gRPC the certificates anew makes the tickets of all earlier sessions worthless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from controlplane.clock import Clock
from controlplane.config import certificate_checks
from controlplane.config.settings import ServerTls

_CHECK_INTERVAL_SECONDS = 1.0  # seconds between two looks at the files
_SESSION_TICKET_SECONDS = 60.0  # seconds in which a TLS session can be resumed
# Seconds after which it is told again that files cannot be used: the old certificates end some day, and what
# the metrics show is when those in the files do.
_REMINDER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _CertificateFiles:
    """What the files hold, as PEM."""

    key: bytes
    cert: bytes
    client_ca: bytes | None

    def to_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class ServerCertificates:
    """The certificates that new connections get. All but gRPC's callback belongs to one event loop."""

    def __init__(self, tls: ServerTls, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        """`on_event` gets kind, subject and message of an event. OSError when a file cannot be read."""
        self._tls = tls
        self._clock = clock
        self._on_event = on_event
        self._loaded = self._served = _read_files(tls)
        self._served_at = clock()
        self._problem = ""  # what was wrong with the files at the latest look
        self._reported_problem, self._reported_at = "", 0.0

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._served.to_grpc(), self._fetch, self._tls.client_ca is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, when it is time to give them again. gRPC calls this in threads of its own."""
        files, now = self._loaded, self._clock()
        if files is self._served and now < self._served_at + _SESSION_TICKET_SECONDS:
            return None
        self._served, self._served_at = files, now
        return files.to_grpc()

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Take over what the files hold, if it can be used; else the old certificates stay."""
        found = await asyncio.to_thread(_load_if_valid, self._tls, self._loaded)
        if isinstance(found, str):
            # Certificate and key are two files, and between the two renames they do not fit.
            now = self._clock()
            if found == self._problem and (
                found != self._reported_problem or now >= self._reported_at + _REMINDER_SECONDS
            ):
                self._reported_problem, self._reported_at = found, now
                self._on_event(
                    "xds.certificates_rejected", "xds.tls", f"the old certificates stay in use: {found}"
                )
            self._problem = found
            return
        if found is not None:
            self._loaded = found
            self._on_event(
                "xds.certificates", "xds.tls", "Envoys that connect from now on get the new certificates"
            )
        self._problem = self._reported_problem = ""


def _load_if_valid(tls: ServerTls, current: _CertificateFiles) -> _CertificateFiles | str | None:
    """What the files hold now; None: what was there before; a text: why it cannot be used. Reads files."""
    try:
        found = _read_files(tls)
        if found == current:
            return None
        if faults := certificate_checks.check_section(("xds", "tls"), tls):
            return "; ".join(f"{fault.problem}; {fault.remedy}" for fault in faults)
        # What was checked is what was read, or it is looked at again.
        return found if _read_files(tls) == found else None
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _read_files(tls: ServerTls) -> _CertificateFiles:
    ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return _CertificateFiles(tls.key.read_bytes(), tls.cert.read_bytes(), ca)

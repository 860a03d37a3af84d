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

_INTERVAL = 1.0  # seconds between two looks at the files
_TICKETS = 60.0  # seconds in which a TLS session can be resumed
# Seconds after which it is told again that files cannot be used: the old certificates end some day, and what
# the metrics show is when those in the files do.
_REMIND = 3600.0


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files hold, as PEM."""

    key: bytes
    cert: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class Certificates:
    """The certificates that new connections get. All but gRPC's callback belongs to one event loop."""

    def __init__(self, tls: ServerTls, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        """`on_event` gets kind, subject and message of an event. OSError when a file cannot be read."""
        self._tls = tls
        self._clock = clock
        self._on_event = on_event
        self._files = self._given = _read(tls)
        self._given_at = clock()
        self._problem = ""  # what was wrong with the files at the latest look
        self._told, self._told_at = "", 0.0

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._given.configuration(), self._fetch, self._tls.client_ca is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, when it is time to give them again. gRPC calls this in threads of its own."""
        files, now = self._files, self._clock()
        if files is self._given and now < self._given_at + _TICKETS:
            return None
        self._given, self._given_at = files, now
        return files.configuration()

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.look()

    async def look(self) -> None:
        """Take over what the files hold, if it can be used; else the old certificates stay."""
        found = await asyncio.to_thread(_usable, self._tls, self._files)
        if isinstance(found, str):
            # Certificate and key are two files, and between the two renames they do not fit.
            now = self._clock()
            if found == self._problem and (found != self._told or now >= self._told_at + _REMIND):
                self._told, self._told_at = found, now
                self._on_event(
                    "xds.certificates_rejected", "xds.tls", f"the old certificates stay in use: {found}"
                )
            self._problem = found
            return
        if found is not None:
            self._files = found
            self._on_event(
                "xds.certificates", "xds.tls", "Envoys that connect from now on get the new certificates"
            )
        self._problem = self._told = ""


def _usable(tls: ServerTls, present: _Files) -> _Files | str | None:
    """What the files hold now; None: what was there before; a text: why it cannot be used. Reads files."""
    try:
        found = _read(tls)
        if found == present:
            return None
        if faults := certificate_checks.of_section(("xds", "tls"), tls):
            return "; ".join(f"{fault.problem}; {fault.remedy}" for fault in faults)
        # What was checked is what was read, or it is looked at again.
        return found if _read(tls) == found else None
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _read(tls: ServerTls) -> _Files:
    ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    return _Files(tls.key.read_bytes(), tls.cert.read_bytes(), ca)

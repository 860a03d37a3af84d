"""Certificates that are rotated while a proxy runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from pathlib import Path

import pymysql
import trustme
from cryptography import x509

from tests.support.waiting import wait_until


class CertificateRotation:
    """A CA, and the proxy's certificate and key in two files. `rotate` replaces each file by a rename."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._authority = trustme.CA()
        self._cert, self._key = directory / "cert.pem", directory / "key.pem"
        self._versions = itertools.count()
        self.serial = 0
        self.rotate()

    @property
    def files(self) -> dict[str, str]:
        """Paths of the files, by the keys of the module's settings."""
        return {"cert": str(self._cert), "key": str(self._key)}

    def client_context(self) -> ssl.SSLContext:
        """Return a client context that trusts the CA."""
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context

    def rotate(self) -> None:
        """Write a new certificate and key."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        pem = issued.cert_chain_pems[0].bytes()
        # Between the two renames, certificate and key do not match. The proxy keeps the old pair.
        pairs = [(self._cert, pem), (self._key, issued.private_key_pem.bytes())]
        if next(self._versions) % 2:
            pairs.reverse()
        for file, content in pairs:
            new_file = file.with_suffix(".new")
            new_file.write_bytes(content)
            os.replace(new_file, file)
        self.serial = x509.load_pem_x509_certificate(pem).serial_number

    async def wait_until_served(self, port: int, trusting: ssl.SSLContext, seconds: float) -> None:
        """Log in until a new session gets the current certificate. Raises TimeoutError."""

        async def is_served() -> bool:
            return await asyncio.to_thread(_served_serial, port, trusting) == self.serial

        await wait_until(is_served, seconds)


def _served_serial(port: int, trusting: ssl.SSLContext) -> int:
    """Return the serial number of the certificate that a new session gets."""
    with pymysql.connect(
        host="127.0.0.1", port=port, user="root", ssl=trusting, connect_timeout=30, read_timeout=30
    ) as connection:
        connection.ping(reconnect=False)
        secure = connection._sock  # type: ignore[attr-defined]
        peer_cert = secure.getpeercert()
        return int(peer_cert["serialNumber"], 16)

"""Certificates that are valid for some seconds only."""

from __future__ import annotations

import math
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from sandbox.session_certificate import SessionCertificate
from tests.support.waiting import wait_until

LONG_SECONDS = 86_400.0


class CertificateFiles:
    """A certificate of a CA and its key, in two files. `names` are the names in the certificate."""

    def __init__(self, authority: trustme.CA, directory: Path, file_name: str, *names: str) -> None:
        self._authority, self._names = authority, names
        self.cert, self.key = directory / f"{file_name}.pem", directory / f"{file_name}.key"
        self.renew(LONG_SECONDS)

    @property
    def settings(self) -> dict[str, str]:
        return {"cert": str(self.cert), "key": str(self.key)}

    def renew(self, valid_seconds: float) -> None:
        """Replace the files by a new certificate and key, as an operator does: by renames, the key first."""
        # A certificate has whole seconds.
        self.expires_at = math.ceil(time.time() + valid_seconds)
        not_after = datetime.fromtimestamp(self.expires_at, UTC)
        issued = self._authority.issue_cert(*self._names, not_after=not_after)
        for file, pem in ((self.key, issued.private_key_pem), (self.cert, issued.cert_chain_pems[0])):
            new_file = file.with_name(f"{file.name}.new")
            new_file.write_bytes(pem.bytes())
            os.replace(new_file, file)

    async def wait_until_expired(self) -> None:
        await wait_for_time(self.expires_at)


async def wait_for_time(unix_time: float) -> None:
    """Wait until a certificate that expires at this time is certainly invalid."""
    remaining = unix_time - time.time()
    await wait_until(lambda: time.time() > unix_time + 1.0, max(0.0, remaining) + 5.0)


def write_session_certificate(directory: Path, expires_at: float) -> SessionCertificate:
    """Write a self-signed certificate for session tokens."""
    directory.mkdir(parents=True)
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tokens")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(minutes=5))
        .not_valid_after(datetime.fromtimestamp(expires_at, UTC))
        .sign(key, None)
    )
    files = SessionCertificate(directory / "session.crt", directory / "session.key")
    pem, pkcs8, plain = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    files.key.write_bytes(key.private_bytes(pem, pkcs8, plain))
    files.cert.write_bytes(certificate.public_bytes(pem))
    return files

"""The certificate that all nodes of a cluster share: they sign session tokens with it when sessions move."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

_LIFETIME = timedelta(days=3650)
_NAMES = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


@dataclass(frozen=True, slots=True)
class SessionCertificate:
    """PEM files. The certificate is self-signed and names localhost, so nodes can also use it for TLS."""

    cert: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Returns the certificate in `directory`, and creates it if it is missing."""
        files = cls(directory / "session.crt", directory / "session.key")
        if files.cert.exists():
            return files
        directory.mkdir(parents=True, exist_ok=True)
        key = Ed25519PrivateKey.generate()
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        # The certificate appears last, and complete: if it exists, the key is complete, too.
        new = files.cert.with_suffix(".new")
        new.write_bytes(_self_signed(key).public_bytes(serialization.Encoding.PEM))
        new.replace(files.cert)
        return files


def signing_arguments(directory: Path) -> tuple[str, ...]:
    """The arguments that give stand-ins the certificate in `directory`."""
    files = SessionCertificate.make(directory)
    return f"--session-token-signing-cert={files.cert}", f"--session-token-signing-key={files.key}"


def _self_signed(key: Ed25519PrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "session tokens")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(_NAMES), critical=False)
        .sign(key, None)
    )

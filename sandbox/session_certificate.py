"""The certificate that all nodes of a cluster share. It signs the session tokens for migrations."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.x509.oid import NameOID

_VALIDITY = timedelta(days=3650)
_RSA_BITS = 2048
_Key: TypeAlias = Ed25519PrivateKey | RSAPrivateKey
_SUBJECT_ALTERNATIVE_NAMES = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


@dataclass(frozen=True, slots=True)
class SessionCertificate:
    """PEM files. The certificate is self-signed for localhost, so nodes can also use it for TLS."""

    cert: Path
    key: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        """The certificate as command-line options of a simulated TiDB server."""
        return f"--session-token-signing-cert={self.cert}", f"--session-token-signing-key={self.key}"

    @property
    def settings(self) -> dict[str, Any]:
        """The certificate as keyword arguments of a simulated TiDB server's SimSettings."""
        return {"signing_cert": str(self.cert), "signing_key": str(self.key)}

    @classmethod
    def load_or_create(cls, directory: Path, *, rsa: bool = False) -> Self:
        """Return the certificate in `directory`. Create it if missing, with an Ed25519 key unless `rsa`."""
        files = cls(directory / "session.crt", directory / "session.key")
        if files.cert.exists():
            return files
        directory.mkdir(parents=True, exist_ok=True)
        key = generate_private_key(65537, _RSA_BITS) if rsa else Ed25519PrivateKey.generate()
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        # The certificate is written last and atomically: if it exists, the key is complete.
        temporary = files.cert.with_suffix(".new")
        temporary.write_bytes(_self_signed(key).public_bytes(serialization.Encoding.PEM))
        temporary.replace(files.cert)
        return files


def _self_signed(key: _Key) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "session tokens")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(_SUBJECT_ALTERNATIVE_NAMES), critical=False)
        .sign(key, hashes.SHA384() if isinstance(key, RSAPrivateKey) else None)
    )

"""The certificate of real TiDB servers: it signs session tokens, and is shown to clients that ask for TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

_LIFETIME = timedelta(days=3650)
_KEY_BITS = 2048


@dataclass(frozen=True, slots=True)
class NodeCertificates:
    """PEM files. `ca` has signed `cert`, which is for 127.0.0.1 and localhost, and all servers share."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> NodeCertificates:
        """Those in `directory`, made if they are not there."""
        made = cls(directory / "ca.pem", directory / "server.pem", directory / "server.key")
        if all(path.exists() for path in (made.ca, made.cert, made.key)):
            return made
        directory.mkdir(parents=True, exist_ok=True)
        authority_key, key = (rsa.generate_private_key(65537, _KEY_BITS) for _ in range(2))
        authority = _name("Tidevoy sandbox CA")
        ca = (
            _builder(authority, authority, authority_key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(authority_key, hashes.SHA256())
        )
        addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        cert = (
            _builder(_name("tidb"), authority, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        made.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        made.key.touch(mode=0o600)
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return made


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
    )

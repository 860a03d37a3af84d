"""Certificates that a test revokes."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from tests.support.clients.server import PemFiles

_LIFETIME = datetime.timedelta(days=1)


class RevokingCa:
    """A CA with a revocation list in a file."""

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.cert, self.crl = directory / "ca.pem", directory / "crl.pem"
        directory.mkdir()
        self._ca.cert_pem.write_to_path(str(self.cert))
        self.revoke()

    def issue(self, name: str) -> PemFiles:
        """Issue a certificate for `name`, 127.0.0.1 and localhost."""
        files = PemFiles.create(self._directory / name)
        certificate = self._ca.issue_cert(name, "127.0.0.1", "localhost")
        files.ca.write_bytes(self._ca.cert_pem.bytes())
        files.cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        files.key.write_bytes(certificate.private_key_pem.bytes())
        return files

    def revoke(self, *revoked: PemFiles) -> None:
        """Replace the list by one with these certificates."""
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(issuer.subject)
            .last_update(now - _LIFETIME)
            .next_update(now + _LIFETIME)
            .add_extension(x509.CRLNumber(1), critical=False)
        )
        for files in revoked:
            serial_number = x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial_number).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        new_file = self.crl.with_suffix(".new")
        new_file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        new_file.rename(self.crl)

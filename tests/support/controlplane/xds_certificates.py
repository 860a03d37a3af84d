"""Files with the certificates of an xDS port and of the Envoys that connect to it."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls

EXPIRED_AT = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
EXPIRES_SOON_AT = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=3)


class XdsPki:
    """A CA, and the files of a control plane that requires certificates of this CA."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self._directory = directory
        self._files = {name: directory / f"{name}.pem" for name in ("cert", "key", "client_ca")}
        self.write_file("client_ca", self.authority.cert_pem.bytes())
        issued = self.issue()
        self.write_file("key", issued.private_key_pem.bytes())
        self.write_file("cert", issued.cert_chain_pems[0].bytes())

    @property
    def settings(self) -> dict[str, str]:
        """The section `xds.tls`."""
        return {name: str(path) for name, path in self._files.items()}

    def issue(self) -> trustme.LeafCert:
        """Issue a certificate for the control plane."""
        return self.authority.issue_cert("127.0.0.1")

    def write_file(self, name: str, pem: bytes) -> None:
        """Replace one of the files by a rename."""
        new_file = self._files[name].with_suffix(".new")
        new_file.write_bytes(pem)
        os.replace(new_file, self._files[name])

    def remove_file(self, name: str) -> None:
        self._files[name].unlink()

    def envoy_tls(self, leaf: trustme.LeafCert | None) -> ControlPlaneTls:
        """Return the TLS files for the bootstrap of an Envoy that presents `leaf`, or no certificate."""
        ca = self._files["client_ca"]
        if leaf is None:
            return ControlPlaneTls(str(ca), "127.0.0.1")
        cert, key = self._directory / "envoy.pem", self._directory / "envoy.key"
        leaf.cert_chain_pems[0].write_to_path(cert)
        leaf.private_key_pem.write_to_path(key)
        return ControlPlaneTls(str(ca), "127.0.0.1", str(cert), str(key))


def channel_credentials(authority: trustme.CA, leaf: trustme.LeafCert | None) -> grpc.ChannelCredentials:
    """Return credentials of a client that trusts `authority` and presents `leaf`, or no certificate."""
    return grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        leaf.private_key_pem.bytes() if leaf is not None else None,
        leaf.cert_chain_pems[0].bytes() if leaf is not None else None,
    )


def channel_credentials_with_uri(authority: trustme.CA, uri: str) -> grpc.ChannelCredentials:
    """Return client credentials whose certificate has a common name and a URI. trustme issues no URIs."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "common")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            ),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), pem, certificate.public_bytes(serialization.Encoding.PEM)
    )

"""Make keys and certificates. No I/O: the time is a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CLOCK_TOLERANCE = timedelta(minutes=5)  # machines whose clock is behind accept new certificates at once
_MAX_COMMON_NAME_CHARS = 64  # RFC 5280, ub-common-name


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """The certificate and the key that sign other certificates."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def new_key() -> EllipticCurvePrivateKey:
    return generate_private_key(SECP256R1())


def key_pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificates_pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def is_key_of(public_key: PublicKeyTypes, certificate: x509.Certificate) -> bool:
    """Return whether a certificate is for this key."""
    return _encoded(public_key) == _encoded(certificate.public_key())


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Return whether the issuer has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def make_authority(key: EllipticCurvePrivateKey, now: datetime, validity: timedelta) -> CertificateAuthority:
    """Return a new CA. Its name is unique, so that a verifier can tell the CA from an earlier one."""
    serial = x509.random_serial_number()
    subject = _subject(f"Tidevoy CA {now:%Y-%m-%d} {serial & 0xFFFFFFFF:08x}")
    public_key = key.public_key()
    certificate = (
        _builder(subject, subject, public_key, serial, now, now + validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(certificate, key)


def expiry(authority: x509.Certificate, now: datetime, validity: timedelta) -> datetime:
    """Return when a certificate that the CA issues now expires: not after the CA itself."""
    return min(now.replace(microsecond=0) + validity, authority.not_valid_after_utc)


def issue(
    authority: CertificateAuthority,
    names: Sequence[x509.GeneralName],
    public_key: EllipticCurvePublicKey,
    now: datetime,
    validity: timedelta,
    *,
    is_server: bool,
) -> x509.Certificate:
    """Return a certificate for these names. An Envoy's is not valid for a server."""
    # Control planes are clients too, of each other.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if is_server else [])]
    issuer, issuer_key = authority.certificate, authority.key.public_key()
    expires_at = expiry(issuer, now, validity)
    return (
        _builder(
            _subject(str(names[0].value)),
            issuer.subject,
            public_key,
            x509.random_serial_number(),
            now,
            expires_at,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: EllipticCurvePublicKey,
    serial: int,
    now: datetime,
    expires_at: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(expires_at)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_MAX_COMMON_NAME_CHARS])])


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)

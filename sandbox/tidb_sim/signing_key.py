"""The certificate and key that sign session tokens, the same on all nodes of a cluster.

The certificate's own signature determines the algorithm (pingcap/tidb
pkg/sessionctx/sessionstates/session_token.go). Only this module needs the package `cryptography`.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.x509 import Certificate, load_pem_x509_certificate
from cryptography.x509.oid import SignatureAlgorithmOID

from controlplane.errors import ConfigError
from sandbox.tidb_sim.session_token import Signer

_HASH_BY_SIGNATURE_ALGORITHM: dict[object, hashes.HashAlgorithm] = {
    SignatureAlgorithmOID.RSA_WITH_SHA256: hashes.SHA256(),
    SignatureAlgorithmOID.RSA_WITH_SHA384: hashes.SHA384(),
    SignatureAlgorithmOID.RSA_WITH_SHA512: hashes.SHA512(),
}
_REMEDY = "give session-token-signing-cert and session-token-signing-key in PEM, of RSA or Ed25519"


def load_signer(cert: Path, key: Path) -> Signer:
    """Read both files. Raises ConfigError if one cannot be read, or they do not belong together.

    TiDB also accepts RSA-PSS and ECDSA; its ECDSA signatures protect only the first bytes of a token.
    """
    certificate, private = _load_certificate(cert), _load_private_key(key)
    if isinstance(private, Ed25519PrivateKey):
        signer = _ed25519_signer(private)
        matches = certificate.public_key() == private.public_key()
    elif isinstance(private, RSAPrivateKey):
        hashing = _HASH_BY_SIGNATURE_ALGORITHM.get(certificate.signature_algorithm_oid)
        if hashing is None:
            raise ConfigError(str(cert), "", "it is not signed by RSA (PKCS#1 v1.5) with SHA-2", _REMEDY)
        signer = _rsa_signer(private, hashing)
        matches = certificate.public_key() == private.public_key()
    else:
        raise ConfigError(str(key), "", "this type of key is not supported", _REMEDY)
    if not matches:
        raise ConfigError(str(key), "", f"it is not the key of {cert}", _REMEDY)
    return signer


def _load_certificate(path: Path) -> Certificate:
    try:
        return load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "", f"not a certificate: {error}", _REMEDY) from error


def _load_private_key(path: Path) -> object:
    try:
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(str(path), "", f"not a private key: {error}", _REMEDY) from error


def _ed25519_signer(private: Ed25519PrivateKey) -> Signer:
    def verify(content: bytes, signature: bytes) -> bool:
        try:
            private.public_key().verify(signature, content)
        except InvalidSignature:
            return False
        return True

    return Signer(private.sign, verify)


def _rsa_signer(private: RSAPrivateKey, hashing: hashes.HashAlgorithm) -> Signer:
    def sign(content: bytes) -> bytes:
        return private.sign(content, padding.PKCS1v15(), hashing)

    def verify(content: bytes, signature: bytes) -> bool:
        try:
            private.public_key().verify(signature, content, padding.PKCS1v15(), hashing)
        except InvalidSignature:
            return False
        return True

    return Signer(sign, verify)

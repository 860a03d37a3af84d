"""Session tokens. A proxy can use a token for a minute to log a user in to another node without the password.

Keys, signed bytes and checks: pingcap/tidb pkg/sessionctx/sessionstates/session_token.go. All nodes of a
cluster have the same certificate and key. Tokens are signed with the algorithm that signed the certificate.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from cryptography.x509.oid import SignatureAlgorithmOID

from controlplane.errors import ConfigError

_T = TypeVar("_T")
_HASH_BY_SIGNATURE_ALGORITHM: dict[object, hashes.HashAlgorithm] = {
    SignatureAlgorithmOID.RSA_WITH_SHA256: hashes.SHA256(),
    SignatureAlgorithmOID.RSA_WITH_SHA384: hashes.SHA384(),
    SignatureAlgorithmOID.RSA_WITH_SHA512: hashes.SHA512(),
}
_REMEDY = "give session-token-signing-cert and session-token-signing-key in PEM, of RSA or Ed25519"

_NANOSECONDS_PER_SECOND = 10**9
LIFETIME_NANOSECONDS = 60 * _NANOSECONDS_PER_SECOND  # Lifetime of a token.

_SIGNED_FIELDS = ("username", "sign-time", "expire-time")
_ESCAPED_BY_GO = "<>&\u2028\u2029"
_RFC3339_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class TokenRejected(Exception):
    """The token does not permit a login (ERR 1045). The text is the reason, which TiDB only logs."""


@dataclass(frozen=True)
class Signer:
    """One key pair, see `load_signer`. `verify(content, signature)` tells whether the signature is valid."""

    sign: Callable[[bytes], bytes]
    verify: Callable[[bytes, bytes], bool]


def issue_token(signer: Signer, user: str, now: int) -> dict[str, str]:
    """Return a token for `user`, as a JSON object. `now`: nanoseconds since 1970."""
    token = {
        "username": user,
        "sign-time": format_go_time(now),
        "expire-time": format_go_time(now + LIFETIME_NANOSECONDS),
    }
    return token | {"signature": base64.b64encode(signer.sign(signed_bytes(token))).decode()}


def verify_token(signer: Signer, token: bytes, user: str, now: int) -> None:
    """Check a login of `user` with a token at `now` (nanoseconds since 1970). Raises TokenRejected.

    A token from the future is accepted, since clocks differ. Both `expire-time` and the age
    are checked, because another version of TiDB may have issued the token with a longer lifetime.
    """
    try:
        stored = json.loads(token)
        fields = {name: str(stored[name]) for name in _SIGNED_FIELDS}
        signed, expires = (parse_rfc3339(fields[name]) for name in _SIGNED_FIELDS[1:])
        signature = base64.b64decode(stored["signature"], validate=True)
        content = signed_bytes(fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokenRejected(f"it is not a session token ({error!r})") from error
    if not signer.verify(content, signature):
        raise TokenRejected("its signature is not from our key")
    if now > expires:
        raise TokenRejected(f"it expired at {fields['expire-time']}")
    if now > signed + LIFETIME_NANOSECONDS:
        raise TokenRejected(f"it was signed more than a minute ago, at {fields['sign-time']}")
    if user.casefold() != fields["username"].casefold():
        raise TokenRejected(f"it belongs to {fields['username']!r}, not to {user!r}")


def signed_bytes(token: Mapping[str, str]) -> bytes:
    """Return the signed bytes: the token without its signature, encoded as Go's encoding/json does."""
    text = json.dumps(
        {name: token[name] for name in _SIGNED_FIELDS}, ensure_ascii=False, separators=(",", ":")
    )
    for char in _ESCAPED_BY_GO:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode()


def format_go_time(nanoseconds_since_epoch: int) -> str:
    """Format nanoseconds since 1970 as Go does in JSON: RFC 3339, with no trailing zeros in the fraction."""
    seconds, fraction = divmod(nanoseconds_since_epoch, _NANOSECONDS_PER_SECOND)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def parse_rfc3339(text: str) -> int:
    """Parse an RFC 3339 time in any zone. Return nanoseconds since 1970. Raises ValueError."""
    match = _RFC3339_TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    zone = "+00:00" if match[3] == "Z" else match[3]
    seconds = int(datetime.fromisoformat(match[1] + zone).timestamp())
    return seconds * _NANOSECONDS_PER_SECOND + int((match[2] or "").ljust(9, "0"))


def load_signer(cert: Path, key: Path) -> Signer:
    """Read a certificate and its key. Raises ConfigError if they cannot be read or do not belong together.

    TiDB also accepts RSA-PSS and ECDSA, which are not supported here. With ECDSA, TiDB signs only the first
    bytes of a token.
    """
    certificate = _load(cert, "a certificate", load_pem_x509_certificate)
    private = _load(key, "a private key", lambda pem: load_pem_private_key(pem, None))
    scheme: tuple[Any, ...] = ()
    if isinstance(private, RSAPrivateKey):
        hashing = _HASH_BY_SIGNATURE_ALGORITHM.get(certificate.signature_algorithm_oid)
        if hashing is None:
            raise ConfigError(str(cert), "", "it is not signed by RSA (PKCS#1 v1.5) with SHA-2", _REMEDY)
        scheme = (PKCS1v15(), hashing)
    elif not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(str(key), "", "this type of key is not supported", _REMEDY)
    public = private.public_key()
    if certificate.public_key() != public:
        raise ConfigError(str(key), "", f"it is not the key of {cert}", _REMEDY)

    def verify(content: bytes, signature: bytes) -> bool:
        try:
            public.verify(signature, content, *scheme)
        except InvalidSignature:
            return False
        return True

    return Signer(lambda content: private.sign(content, *scheme), verify)


def _load(path: Path, kind: str, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(str(path), "", f"not {kind}: {error}", _REMEDY) from error

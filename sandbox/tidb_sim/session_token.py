"""Session tokens, with which a proxy can log a user in to another node for a minute without the password.

Keys, signed bytes and checks: pingcap/tidb pkg/sessionctx/sessionstates/session_token.go.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_NANOSECONDS_PER_SECOND = 10**9
LIFETIME_NANOSECONDS = 60 * _NANOSECONDS_PER_SECOND
"""Lifetime of a token."""

_SIGNED_FIELDS = ("username", "sign-time", "expire-time")
_ESCAPED_BY_GO = "<>&\u2028\u2029"
_RFC3339_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class TokenRejected(Exception):
    """The token does not permit a login; the text is the reason, which TiDB only logs (ERR 1045)."""


@dataclass(frozen=True)
class Signer:
    """One key pair (`signing_key.py` loads it). `verify`: whether the second argument signs the first."""

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

    A token from the future is accepted: clocks differ. `expire-time` alone is not trusted, because another
    version may have written it.
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
    """Return the signed bytes: the token without its signature, as Go's encoding/json writes it."""
    text = json.dumps(
        {name: token[name] for name in _SIGNED_FIELDS}, ensure_ascii=False, separators=(",", ":")
    )
    for char in _ESCAPED_BY_GO:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode()


def format_go_time(nanoseconds_since_epoch: int) -> str:
    """Format nanoseconds since 1970 as Go does in JSON: RFC 3339, the fraction without trailing zeros."""
    seconds, fraction = divmod(nanoseconds_since_epoch, _NANOSECONDS_PER_SECOND)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def parse_rfc3339(text: str) -> int:
    """Parse an RFC 3339 time in any zone to nanoseconds since 1970. Raises ValueError."""
    match = _RFC3339_TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    zone = "+00:00" if match[3] == "Z" else match[3]
    seconds = int(datetime.fromisoformat(match[1] + zone).timestamp())
    return seconds * _NANOSECONDS_PER_SECOND + int((match[2] or "").ljust(9, "0"))

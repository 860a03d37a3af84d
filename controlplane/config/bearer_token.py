"""Bearer tokens in files, as they are sent in the HTTP header `Authorization`."""

from __future__ import annotations

from pathlib import Path

_MAX_TOKEN_BYTES = 64 * 1024  # A path like /dev/zero must not fill the memory.


class InvalidTokenFile(Exception):
    """A token file is unusable. The message continues a sentence that starts with the file or its setting."""


def is_valid_token(text: str) -> bool:
    """Return whether `text` can be sent as a token.

    Tokens are checked, because the HTTP library's error about an invalid header would contain the token.
    """
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def read_bearer_token(path: Path) -> str:
    """Return the token in a file, without surrounding white space. Raises InvalidTokenFile."""
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).decode("latin-1").strip()
    except OSError as error:
        raise InvalidTokenFile(f"cannot be read: {error.strerror}") from error
    if not token:
        raise InvalidTokenFile("is empty; write the token into it")
    if not is_valid_token(token):
        raise InvalidTokenFile("contains no token (one line of printable ASCII without spaces)")
    return token

"""Maps MySQL's character sets to Python codecs."""

from __future__ import annotations

import codecs

# Character sets whose names Python does not know, or uses for other encodings.
_MARIADB_CODECS = {"latin1": "cp1252", "koi8r": "koi8-r", "koi8u": "koi8-u"}
_TIDB_CODECS = {"ascii": "ascii", "gbk": "gbk", "gb18030": "gb18030"}


def mariadb_codec(charset: str) -> str:
    """Return MariaDB's encoding of a character set as a Python codec; UTF-8 if it is unknown."""
    try:
        return codecs.lookup(_MARIADB_CODECS.get(charset.lower(), charset)).name
    except LookupError:
        return "utf-8"


def tidb_codec(charset: str) -> str:
    """Return TiDB's encoding of a character set as a Python codec.

    TiDB treats latin1 as UTF-8 (pingcap/tidb pkg/parser/charset/encoding_latin1.go).
    """
    return _TIDB_CODECS.get(charset.lower(), "utf-8")


def decode_statement(text: bytes, charset: str) -> str:
    """Decode a statement as UTF-8, or if that fails, as `charset`; invalid bytes are replaced."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode(mariadb_codec(charset), errors="replace")


def decode_prepared_text(text: bytes, charset: str) -> str:
    """Decode the text of a prepared statement as UTF-8, or if that fails, as `charset` in TiDB.

    U+FFFD replaces invalid bytes, as in the states that TiDB exports.
    """
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode(tidb_codec(charset), errors="replace")

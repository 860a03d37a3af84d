"""Maps MySQL's character sets to Python codecs."""

from __future__ import annotations

_MARIADB_CODECS = {
    "latin1": "cp1252",
    "latin2": "iso8859-2",
    "latin5": "iso8859-9",
    "latin7": "iso8859-13",
    "ascii": "ascii",
    "gbk": "gbk",
    "gb2312": "gb2312",
    "big5": "big5",
    "sjis": "shift_jis",
    "cp932": "cp932",
    "ujis": "euc_jp",
    "euckr": "euc_kr",
    "koi8r": "koi8-r",
    "koi8u": "koi8-u",
    "greek": "iso8859-7",
    "hebrew": "iso8859-8",
    "cp1250": "cp1250",
    "cp1251": "cp1251",
    "cp1256": "cp1256",
    "cp1257": "cp1257",
}
_TIDB_CODECS = {"ascii": "ascii", "gbk": "gbk", "gb18030": "gb18030"}


def mariadb_codec(charset: str) -> str:
    """Return MariaDB's encoding of a character set; unknown ones are treated as UTF-8."""
    return _MARIADB_CODECS.get(charset.lower(), "utf-8")


def tidb_codec(charset: str) -> str:
    """Return TiDB's encoding; latin1 is UTF-8 (pingcap/tidb pkg/parser/charset/encoding_latin1.go)."""
    return _TIDB_CODECS.get(charset.lower(), "utf-8")


def decode_statement(text: bytes, charset: str) -> str:
    """Decode a statement as UTF-8, else as `charset`; bytes valid in neither are replaced."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode(mariadb_codec(charset), errors="replace")

"""Parses SQL as far as the simulated server needs it: string literals and ends of statements. No I/O.

Literals: MySQL reference manual, "String Literals"; `\\%` and `\\_` keep their backslash (pingcap/tidb
pkg/parser/lexer.go).
"""

from __future__ import annotations

import re

STRING_LITERAL_PATTERNS = {
    True: rb"""(?:'(?:[^'\\]++|\\.|'')*+'|"(?:[^"\\]++|\\.|"")*+")""",
    False: rb"""(?:'(?:[^']++|'')*+'|"(?:[^"]++|"")*+")""",
}
"""Patterns of a string literal in bytes, for DOTALL. The key is whether a backslash escapes."""

_STATEMENT_TOKENS = {
    backslash: re.compile(rb"(?s)(" + literal + rb"|`[^`]*+`)|(/\*.*?\*/|--(?=\s|\Z)[^\n]*|#[^\n]*)|;")
    for backslash, literal in STRING_LITERAL_PATTERNS.items()
}
_LITERALS = {
    backslash: re.compile("(?s)" + literal.decode()) for backslash, literal in STRING_LITERAL_PATTERNS.items()
}
_ESCAPED_CHARACTERS = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a"}


def parse_string_literal(
    text: str, *, backslash_escapes: bool, double_quotes: bool = True
) -> tuple[str, str] | None:
    """Return the value of the literal at the start of `text` and the text after it; None if there is none.

    `backslash_escapes`: false with NO_BACKSLASH_ESCAPES. `double_quotes`: false with ANSI_QUOTES.
    """
    quote = text[:1]
    if quote != "'" and not (quote == '"' and double_quotes):
        return None
    match = _LITERALS[backslash_escapes].match(text)
    if match is None:
        return None
    content, rest = match[0][1:-1], text[match.end() :]
    if backslash_escapes:
        return re.sub(rf"(?s)\\(.)|{quote}{quote}", _unescape, content), rest
    return content.replace(quote + quote, quote), rest


def split_statements(text: bytes, *, backslash_escapes: bool = True) -> list[bytes]:
    """Return the statements of a text, without comments and surrounding whitespace."""
    statements: list[bytes] = []
    parts: list[bytes] = []
    at = 0
    for token in _STATEMENT_TOKENS[backslash_escapes].finditer(text):
        if token[1] is not None:
            continue
        parts.append(text[at : token.start()])
        at = token.end()
        if token[2] is not None:
            parts.append(b" ")
        else:
            statements.append(b"".join(parts))
            parts.clear()
    statements.append(b"".join((*parts, text[at:])))
    return [statement.strip(b" \t\r\n\0") for statement in statements if statement.strip(b" \t\r\n\0")]


def _unescape(match: re.Match[str]) -> str:
    char = match[1]
    if char is None:
        return match[0][0]
    return match[0] if char in "%_" else _ESCAPED_CHARACTERS.get(char, char)

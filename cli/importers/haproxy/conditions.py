"""Evaluates the conditions of `.if` and `.elif` in an HAProxy configuration. No I/O.

Source: section 2.4 "Conditional blocks" of HAProxy's configuration manual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from cli.importers.haproxy.lexer import LexerError

_REMEDY = "write a condition as in section 2.4 of HAProxy's configuration manual"
_TOKEN = re.compile(r"\s*(&&|\|\||[!()]|-?\d+|[A-Za-z_][A-Za-z0-9_]*(?=\()|$)")
_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "streq": lambda one, other: one == other,
    "strneq": lambda one, other: one != other,
    "strstr": lambda text, part: part in text,
}
# They depend on HAProxy's version and build. A configuration in use usually suits them.
_ASSUMED_TRUE = frozenset(
    ("feature", "version_atleast", "openssl_version_atleast", "awslc_api_atleast", "ssllib_name_startswith")
)
_ASSUMED_FALSE = frozenset(("version_before", "openssl_version_before", "awslc_api_before", "fips_mode"))
_MAX_DEPTH = 50


def evaluate(text: str, variables: Mapping[str, str]) -> tuple[bool, tuple[str, ...]]:
    """Return whether a condition is true, and the predicates that were assumed. Raises LexerError.

    An empty condition is false.
    """
    if not text.strip():
        return False, ()
    parser = _ConditionParser(text, variables)
    return parser.parse(), tuple(parser.assumed)


class _ConditionParser:
    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self._text, self._variables = text, variables
        self._position = self._depth = 0
        self.assumed: list[str] = []

    def parse(self) -> bool:
        result = self._parse_or()
        if self._next() != "":
            raise LexerError(f"the condition {self._text!r} has an unexpected end", _REMEDY)
        return result

    def _next(self) -> str:
        """Return the next token without consuming it; empty at the end."""
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            raise LexerError(f"the condition {self._text!r} is not valid", _REMEDY)
        return match[1]

    def _consume(self) -> str:
        token = self._next()
        match = _TOKEN.match(self._text, self._position)
        self._position = self._position if match is None else match.end()
        return token

    def _parse_or(self) -> bool:
        result = self._parse_and()
        while self._next() == "||":
            self._consume()
            result = self._parse_and() or result
        return result

    def _parse_and(self) -> bool:
        result = self._parse_term()
        while self._next() == "&&":
            self._consume()
            result = self._parse_term() and result
        return result

    def _parse_term(self) -> bool:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise LexerError("the condition is nested too deeply", _REMEDY)
        symbol = self._consume()
        if symbol == "!":
            result = not self._parse_term()
        elif symbol == "(":
            result = self._parse_or()
            if self._consume() != ")":
                raise LexerError(f"the condition {self._text!r} has an unclosed parenthesis", _REMEDY)
        elif symbol.lstrip("-").isdigit():
            result = int(symbol) != 0
        elif symbol and (symbol[0].isalpha() or symbol[0] == "_"):
            result = self._call(symbol)
        else:
            raise LexerError(f"the condition {self._text!r} is not valid", _REMEDY)
        self._depth -= 1
        return result

    def _call(self, name: str) -> bool:
        end = self._text.find(")", self._position)
        if end < 0:
            raise LexerError(f"the condition {self._text!r} has an unclosed parenthesis", _REMEDY)
        arguments = self._text[self._position + 1 : end].split(",")
        self._position = end + 1
        if name == "defined":
            return arguments[0] in self._variables
        if name in _COMPARISONS and len(arguments) == 2:
            return _COMPARISONS[name](arguments[0], arguments[1])
        if name in _ASSUMED_TRUE | _ASSUMED_FALSE or name == "enabled":
            self.assumed.append(f"{name}({','.join(arguments)})")
            return name not in _ASSUMED_FALSE
        raise LexerError(f"the condition {self._text!r} uses {name}, which is unknown", _REMEDY)

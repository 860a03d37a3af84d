"""Splits a line of an HAProxy configuration into words. No I/O.

Source: sections 2.2 "Quoting and escaping" and 2.3 "Environment variables" of HAProxy's configuration manual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SPACES = " \t\v\f\r\n"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in " \\#'\""}}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})")
_VARIABLE = re.compile(r"\.?[A-Za-z_][A-Za-z0-9_]*")


class LexerError(Exception):
    """A line is not a valid line of HAProxy's configuration."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}; {remedy}")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a line. `unset`: environment variables that it uses and that are not set."""

    words: tuple[str, ...]
    unset: tuple[str, ...] = ()


def split_words(line: str, variables: Mapping[str, str]) -> Words:
    """Return the words of a line, without its comment. Raises LexerError.

    `variables`: the environment, and pseudo-variables such as `.LINE`. Names are replaced only inside double
    quotes; a name that is not set is replaced by nothing.
    """
    lexer = _LineLexer(line, variables)
    lexer.run()
    return Words(tuple(lexer.words), tuple(dict.fromkeys(lexer.unset)))


class _LineLexer:
    def __init__(self, line: str, variables: Mapping[str, str]) -> None:
        self._line, self._variables = line, variables
        self._position = 0
        self._is_in_word = False
        self._word: list[str] = []
        self.words: list[str] = []
        self.unset: list[str] = []

    def run(self) -> None:
        while char := self._peek():
            if char == "#":
                break
            if char in _SPACES:
                self._position += 1
                self._end_word()
            elif char == "'":
                self._read_strong_quotes()
            elif char == '"':
                self._read_weak_quotes()
            elif char == "\\":
                self._read_escape("")
            else:
                self._position += 1
                self._add(char)
        self._end_word()

    def _peek(self) -> str:
        """Return the next character; empty at the end."""
        return self._line[self._position : self._position + 1]

    def _add(self, text: str) -> None:
        self._word.append(text)
        self._is_in_word = True

    def _end_word(self) -> None:
        if self._is_in_word:
            self.words.append("".join(self._word))
        self._word, self._is_in_word = [], False

    def _read_strong_quotes(self) -> None:
        """Nothing has a special meaning between single quotes."""
        end = self._line.find("'", self._position + 1)
        if end < 0:
            raise _unclosed("'")
        self._add(self._line[self._position + 1 : end])
        self._position = end + 1

    def _read_weak_quotes(self) -> None:
        self._position += 1
        is_empty = True  # empty quotes are an empty word; those around an empty list of words are none
        while (char := self._peek()) != '"':
            if not char:
                raise _unclosed('"')
            if char == "\\":
                self._read_escape("$")
            elif char == "$":
                is_empty = not self._read_variable() and is_empty
                continue
            else:
                self._position += 1
                self._add(char)
        self._position += 1
        if is_empty:
            self._add("")

    def _read_escape(self, more: str) -> None:
        """Read a backslash and what it escapes. `more`: characters that can be escaped only here."""
        self._position += 1
        following = self._peek()
        if match := _HEX.match(self._line, self._position):
            self._position = match.end()
            self._add(chr(int(match[1], 16)))
        elif following == "x":
            raise LexerError(
                "\\x is not followed by two hexadecimal digits", "write \\x41, or \\\\x for text"
            )
        elif following and (following in _ESCAPES or following in more):
            self._position += 1
            self._add(_ESCAPES.get(following, following))
        else:
            self._add("\\")

    def _read_variable(self) -> bool:
        """Read `$NAME`, `${NAME}`, `${NAME-default}` or `${NAME[*]}`. Return whether it is a list."""
        self._position += 1
        has_brace = self._peek() == "{"
        self._position += has_brace
        match = _VARIABLE.match(self._line, self._position)
        if match is None:
            raise LexerError("$ is not followed by the name of a variable", "write \\$ for a dollar sign")
        self._position = match.end()
        is_list = has_brace and self._line.startswith("[*]", self._position)
        self._position += 3 if is_list else 0
        value = self._variables.get(match[0])
        if has_brace:
            end = self._line.find("}", self._position)
            rest = self._line[self._position : end]
            if end < 0 or (rest and not rest.startswith("-")):
                raise LexerError(f"${{{match[0]} has no closing brace", f"write ${{{match[0]}}}")
            value = rest[1:] if value is None and rest else value
            self._position = end + 1
        if value is None:
            self.unset.append(match[0])
            value = ""
        if is_list:
            self._add_words(value)
        else:
            self._add(value)
        return is_list

    def _add_words(self, value: str) -> None:
        """Add a value whose spaces separate words."""
        for part in re.split(rf"([{_SPACES}]+)", value):
            if part and part[0] in _SPACES:
                self._end_word()
            elif part:
                self._add(part)


def _unclosed(quote: str) -> LexerError:
    return LexerError(
        f"a quote ({quote}) is not closed", f"close it, or write \\{quote} for the character itself"
    )

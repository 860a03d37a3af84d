"""Finds the line of each key in a TOML file, which `tomllib` does not tell. No I/O.

The syntax is that of https://toml.io/en/v1.0.0. The file must be valid: `tomllib` has parsed it before.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator

TomlPath = tuple[str | int, ...]

_SPACE, _NEWLINE = " \t", "\r\n"


def key_lines(text: str) -> dict[TomlPath, int]:
    """Return the line of each key and table. Keys inside an inline table are not listed.

    The items of an array of tables have their index in the path.
    """
    lines: dict[TomlPath, int] = {}
    counts: Counter[TomlPath] = Counter()
    table: TomlPath = ()
    for kind, line, key in _statements(text):
        if kind == "array":
            path = _resolve(key[:-1], counts)
            index = counts[*path, key[-1]]
            counts[*path, key[-1]] += 1
            table = (*path, key[-1], index)
        elif kind == "table":
            table = _resolve(key, counts)
        path = (*table, *key) if kind == "value" else table
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def _resolve(key: tuple[str, ...], counts: Counter[TomlPath]) -> TomlPath:
    """Return the path of a table: a name of an array of tables means its last item."""
    path: TomlPath = ()
    for step in key:
        path = (*path, step)
        if counts[path]:
            path = (*path, counts[path] - 1)
    return path


def _statements(text: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the kind (array, table or value), the line and the key of each statement."""
    position = counted = 0
    line = 1
    while position < len(text):
        char = text[position]
        if char in _SPACE + _NEWLINE:
            position += 1
            continue
        if char == "#":
            position = _line_end(text, position)
            continue
        line += text.count("\n", counted, position)
        counted = position
        if char == "[":
            is_array = text.startswith("[[", position)
            start = position + (2 if is_array else 1)
            end = _scan(text, start, "]")
            yield "array" if is_array else "table", line, _parse_key(text[start:end])
            position = _line_end(text, end)
        else:
            end = _scan(text, position, "=")
            yield "value", line, _parse_key(text[position:end])
            position = _value_end(text, end + 1)


def _parse_key(text: str) -> tuple[str, ...]:
    """Return the parts of a key such as `a."b.c"`."""
    parts: list[str] = []
    data = tomllib.loads(f"{text} = 0")
    while isinstance(data, dict):
        ((part, data),) = data.items()
        parts.append(part)
    return tuple(parts)


def _scan(text: str, position: int, stop: str) -> int:
    """Return the position of `stop` outside of quotes."""
    while text[position] != stop:
        position = _skip_string(text, position) if text[position] in "\"'" else position + 1
    return position


def _value_end(text: str, position: int) -> int:
    """Return the position after a value: the end of a line outside of brackets and strings."""
    depth = 0
    while position < len(text):
        char = text[position]
        if char in "\"'":
            position = _skip_string(text, position)
            continue
        if char == "#":
            position = _line_end(text, position)
            continue
        if char == "\n" and depth == 0:
            return position
        depth += (char in "[{") - (char in "]}")
        position += 1
    return position


def _skip_string(text: str, position: int) -> int:
    """Return the position after a string of any of the four kinds."""
    quote = text[position]
    is_long = text.startswith(quote * 3, position)
    end = quote * 3 if is_long else quote
    position += len(end)
    while not text.startswith(end, position):
        position += 2 if quote == '"' and text[position] == "\\" else 1
    position += len(end)
    while is_long and text.startswith(quote, position):  # up to two quotes before the closing ones
        position += 1
    return position


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end

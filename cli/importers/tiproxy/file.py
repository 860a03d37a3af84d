"""Reads TiProxy's configuration file: the values of known keys with their lines and checked types. No I/O."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cli.importers.draft import SourceKey
from cli.importers.key_rules import KeyRule, ValueKind
from cli.importers.tiproxy.keys import RULES
from cli.importers.tiproxy.toml_lines import TomlPath, key_lines
from controlplane.config.schema import format_value
from controlplane.errors import ConfigError

_ERROR_POSITION = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.S)
_DURATION = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SECTIONS = frozenset(
    ".".join(key.replace("[]", "").split(".")[:length])
    for key in RULES
    for length in range(1, key.count(".") + 1)
)
_SECTIONS_OF_TABLES = frozenset(key.partition("[]")[0] for key in RULES if "[]" in key)


@dataclass(frozen=True, slots=True)
class TiProxyKey:
    """A key of the file. `key`: as in `RULES`, with `[]` for any index. `rule`: None for an unknown key."""

    key: str
    source: SourceKey
    value: Any
    rule: KeyRule | None
    index: int | None = None  # of the backend cluster

    @property
    def note(self) -> str:
        return "" if self.rule is None else self.rule.note


class TiProxyKeys:
    """All keys of a file. A converter takes the keys that it adds to the report."""

    def __init__(self, keys: Iterable[TiProxyKey]) -> None:
        self._keys = tuple(keys)
        self._by_name = {each.key: each for each in self._keys if each.index is None}
        self._taken: set[int] = set()  # ids: two keys may be equal

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> TiProxyKey | None:
        """Return a key that belongs to no backend cluster; None if the file does not have it."""
        return self._by_name.get(name)

    def take(self, name: str) -> TiProxyKey | None:
        """Return a key as `get` does, and mark it as taken."""
        found = self.get(name)
        if found is not None:
            self.mark_taken(found)
        return found

    def mark_taken(self, key: TiProxyKey) -> None:
        self._taken.add(id(key))

    def is_taken(self, key: TiProxyKey) -> bool:
        return id(key) in self._taken

    def not_taken(self) -> list[TiProxyKey]:
        return [each for each in self._keys if not self.is_taken(each)]

    def clusters(self) -> list[dict[str, TiProxyKey]]:
        """Return the known keys of each backend cluster by the last part of their names."""
        clusters: dict[int, dict[str, TiProxyKey]] = {}
        for each in self._keys:
            if each.index is not None and each.rule is not None:
                clusters.setdefault(each.index, {})[each.key.rpartition(".")[2]] = each
        return list(clusters.values())


def parse_tiproxy(text: str, name: str) -> TiProxyKeys:
    """Return all keys of the file. Raises ConfigError for invalid TOML and for values of a wrong type."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _ERROR_POSITION.fullmatch(str(error))
        problem = match[1] if match else str(error)
        last_line = text.rstrip("\n").count("\n") + 1
        where = f"{name}:{match[2] or last_line}" if match else name
        remedy = "check quotes, brackets and repeated keys there"
        raise ConfigError(where, "", f"this is not TOML ({problem})", remedy) from None
    except RecursionError:
        raise ConfigError(name, "", "the values are nested too deeply", "check the brackets") from None
    lines = key_lines(text)
    return TiProxyKeys(_iter_keys(data, (), lines, name))


def _iter_keys(
    table: Mapping[str, Any], parent: TomlPath, lines: Mapping[TomlPath, int], name: str
) -> Iterator[TiProxyKey]:
    for step, value in table.items():
        path = (*parent, step)
        # TiProxy's TOML library ignores the case of keys; it matters only for labels.
        key = _rule_key(path)
        source = SourceKey(_display(path), _find_line(path, lines))
        if key in _SECTIONS_OF_TABLES and isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, dict):
                    raise _wrong_type(source, item, "a table", name)
                yield from _iter_keys(item, (*path, index), lines, name)
        elif key in _SECTIONS:
            if not isinstance(value, dict) or key in _SECTIONS_OF_TABLES:
                raise _wrong_type(source, value, "a table", name)
            yield from _iter_keys(value, path, lines, name)
        else:
            rule = RULES.get(key) or (RULES["labels.*"] if key.startswith("labels.") else None)
            cluster = next((part for part in path if isinstance(part, int)), None)
            if rule is None and isinstance(value, dict) and value:
                yield from _iter_keys(value, path, lines, name)
                continue
            checked = value if rule is None else _check_type(value, rule.kind, source, name)
            yield TiProxyKey(key, source, checked, rule, cluster)


def _rule_key(path: TomlPath) -> str:
    text = "".join("[]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    return text if path[0] == "labels" else text.lower()


def _display(path: TomlPath) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


def _find_line(path: TomlPath, lines: Mapping[TomlPath, int]) -> int | None:
    """Return the line of a key; for a key of an inline table, the line of that table."""
    for length in range(len(path), 0, -1):
        if line := lines.get(path[:length]):
            return line
    return None


def _check_type(value: Any, kind: ValueKind, source: SourceKey, name: str) -> Any:
    """Return the value, durations in seconds. Raises ConfigError if its type is wrong."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_list = isinstance(value, list)
    if kind is ValueKind.DURATION and (is_integer or isinstance(value, str)):
        seconds = value * 1e-9 if is_integer else _parse_duration(value)
        if seconds is not None:
            return seconds
    valid = {
        ValueKind.TEXT: isinstance(value, str),
        ValueKind.INTEGER: is_integer,
        ValueKind.NUMBER: is_integer or isinstance(value, float),
        ValueKind.BOOLEAN: isinstance(value, bool),
        ValueKind.DURATION: False,
        ValueKind.TEXTS: is_list and all(isinstance(item, str) for item in value),
        ValueKind.INTEGERS: is_list and all(type(item) is int for item in value),
        ValueKind.ANY: True,
    }
    if not valid[kind]:
        raise _wrong_type(source, value, str(kind), name)
    return value


def _parse_duration(text: str) -> float | None:
    """Parse a duration as Go's `time.ParseDuration` does (https://pkg.go.dev/time#ParseDuration)."""
    if text in ("0", "+0", "-0"):
        return 0.0
    if not _DURATION.fullmatch(text):
        return None
    total = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    return -total if text.startswith("-") else total


def _wrong_type(source: SourceKey, value: Any, expected: str, name: str) -> ConfigError:
    where = name if source.line is None else f"{name}:{source.line}"
    # Not shown if it is text: it may be a secret.
    shown = "the text" if isinstance(value, str) else format_value(value)
    return ConfigError(where, source.name, f"{shown} is not {expected}", f"write {expected}")

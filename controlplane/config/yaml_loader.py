"""Parse YAML into plain data, with the line number of each key.

Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), except numbers with
leading zeros: those, `off`, `no`, `12:30` and dates are text. PyYAML alone would apply YAML 1.1, and
`proxy_protocol: off` would become false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from controlplane.config.schema import SettingPath, format_path
from controlplane.errors import ConfigError

_NOT_YAML_REMEDY = (
    "check the indentation, brackets and quotes there; text with `: `, `#`, `*` or brackets needs quotes"
)
_YAML_ERROR_TEXTS: Mapping[str, tuple[str, str]] = {
    "found character '\\t' that cannot start any token": (
        "a tab is used where YAML allows only spaces",
        "indent with spaces",
    ),
    "mapping values are not allowed here": (
        "there is a colon where a key is not allowed",
        "check the indentation, and put text that contains a colon in quotes",
    ),
    "but found another document": (
        "the file contains a second document",
        "keep one document and remove the --- lines",
    ),
}


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema, and `<<` as the only extra."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own shape of this table


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("merge", r"<<", "<"),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"\A(?:{_pattern})\Z"), list(_first)
    )


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The data of a file, and the line of each key (counted from 1)."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[SettingPath, int] = field(default_factory=dict)


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse the mapping in a YAML text, empty for an empty text. Raises ConfigError with `name` and line."""
    try:
        loader = _CoreLoader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return YamlDocument()
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a text"
            raise ConfigError(
                _location(name, root),
                "",
                f"the file contains {kind}, not settings",
                "write `key: value` lines, such as `pd:`",
            )
        lines: dict[SettingPath, int] = {}
        _record_lines(root, (), name, lines, ())
        return YamlDocument(loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem, remedy = _YAML_ERROR_TEXTS.get(
            error.problem or "", (f"this is not YAML ({error.problem})", _NOT_YAML_REMEDY)
        )
        raise ConfigError(where, "", problem, remedy) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{int(error.character):04X} is not allowed in YAML"
        raise ConfigError(f"{name}:{line}", "", problem, "remove it") from None
    except (ValueError, KeyError, AttributeError):
        # PyYAML's constructors raise these on `!!int x`, `!!bool x` ...
        raise ConfigError(name, "", "a value does not fit its !! tag", "remove the tag") from None
    except RecursionError:
        raise ConfigError(
            name, "", "the values are nested too deeply", "no setting has more than 5 levels"
        ) from None


def _record_lines(
    node: yaml.Node,
    path: SettingPath,
    name: str,
    lines: dict[SettingPath, int],
    ancestors: tuple[yaml.Node, ...],
) -> None:
    """Record the line of every key below a node, and reject what PyYAML would accept silently."""
    if node in ancestors:
        raise ConfigError(
            _location(name, node),
            format_path(path),
            "an alias contains itself",
            "write the value without an alias",
        )
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _record_lines(item, (*path, index), name, lines, (*ancestors, node))
    elif isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    _location(name, key), format_path(path), "a key is not text", "write keys as plain words"
                )
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            key_path = (*path, key.value)
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"the key {key.value} is not text"
                raise ConfigError(_location(name, key), format_path(key_path), problem, "put it in quotes")
            if key.value in first_lines:
                problem = f"the key occurs twice (first on line {first_lines[key.value]})"
                raise ConfigError(_location(name, key), format_path(key_path), problem, "keep one of the two")
            first_lines[key.value] = lines[key_path] = key.start_mark.line + 1
            _record_lines(value, key_path, name, lines, (*ancestors, node))


def _location(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"

"""Parse YAML into plain data, with the line number of each key.

Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `off`, `no`,
`12:30` and dates are text. Numbers with leading zeros are text too. PyYAML alone would apply YAML 1.1, and
`proxy_protocol: off` would become false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from controlplane.config.schema import SettingPath, format_path
from controlplane.errors import ConfigError

_REMEDY = (
    "check the indentation (only spaces), brackets and quotes there; text with `: `, `#`, `*` or brackets"
    " needs quotes"
)
_MAX_DEPTH = 20


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema, and the merge key `<<`."""

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


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[SettingPath, int]]:
    """Return the mapping in a YAML text (empty for an empty text), and each key's line number.

    Raises ConfigError with `name` and, if known, the line.
    """
    content, lines = parse_yaml_value(text, name)
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        remedy = "write `key: value` lines, such as `pd:`"
        raise ConfigError(f"{name}:{lines[()]}", "", "the file contains no settings", remedy)
    del lines[()]
    return content, lines


def parse_yaml_value(text: str, name: str) -> tuple[Any, dict[SettingPath, int]]:
    """Return the value in a YAML text (None for an empty text), and the line numbers of it and of each key.

    Raises ConfigError with `name` and, if known, the line.
    """
    try:
        loader = _CoreLoader(text)
        root = loader.get_node() if loader.check_node() else None
        second = loader.get_node() if loader.check_node() else None
        if second is not None:
            remedy = "put all settings into one document"
            raise ConfigError(_location(name, second), "", "a second document begins here", remedy)
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return None, {}
        lines: dict[SettingPath, int] = {(): root.start_mark.line + 1}
        _record_lines(root, (), name, lines)
        return loader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(where, "", f"this is not YAML ({error.problem})", _REMEDY) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{int(error.character):04X} is not allowed in YAML"
        raise ConfigError(f"{name}:{line}", "", problem, "remove it") from None
    except (ValueError, KeyError, AttributeError):
        # PyYAML's constructors raise these on `!!int x`, `!!bool x` ...
        raise ConfigError(name, "", "a value does not fit its !! tag", "remove the tag") from None
    except RecursionError:  # in PyYAML's parser, on thousands of brackets
        raise ConfigError(name, "", "the values are nested too deeply", _REMEDY) from None


def _record_lines(node: yaml.Node, path: SettingPath, name: str, lines: dict[SettingPath, int]) -> None:
    """Record the line of every key below a node. Reject deep nesting, and duplicate and non-text keys."""
    if len(path) > _MAX_DEPTH:
        problem = "the values are nested too deeply"
        raise ConfigError(_location(name, node), "", problem, "look for an alias that contains itself")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _record_lines(item, (*path, index), name, lines)
    elif isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            key_path = (*path, key.value if isinstance(key, yaml.ScalarNode) else "?")
            if key.tag != "tag:yaml.org,2002:str":
                problem = "the key is not text"
                raise ConfigError(_location(name, key), format_path(key_path), problem, "put it in quotes")
            if key.value in first_lines:
                problem = f"the key occurs twice (first on line {first_lines[key.value]})"
                raise ConfigError(_location(name, key), format_path(key_path), problem, "keep one of the two")
            first_lines[key.value] = lines[key_path] = key.start_mark.line + 1
            _record_lines(value, key_path, name, lines)


def _location(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"

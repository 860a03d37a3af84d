"""Writes settings as YAML, with comments that say where each value comes from. No I/O."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from cli.output import sanitize
from controlplane.config.yaml_loader import parse_yaml
from controlplane.errors import ConfigError

_WIDTH = 110
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@-]*")


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a list of mappings, such as a node. `rows`: indexes of the rows that it comes from."""

    values: Mapping[str, Any]
    comment: str
    rows: tuple[int, ...] = ()


@dataclass(slots=True)
class Assignment:
    """A setting, its value, and the keys that it comes from. `rows`: indexes of their rows in the report.

    `value` is a scalar, a list of scalars, a mapping of scalars, or a list of `Item`.
    """

    path: tuple[str, ...]
    value: Any
    sources: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    todo: str = ""
    remark: str = ""  # a comment above the setting that is no TODO

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def data(self) -> Any:
        """Return the value as it is loaded from YAML."""
        if isinstance(self.value, list):
            return [_plain(item.values) if isinstance(item, Item) else item for item in self.value]
        return _plain(self.value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def build_data(assignments: Sequence[Assignment]) -> dict[str, Any]:
    """Return the assignments as nested mappings."""
    data: dict[str, Any] = {}
    for assignment in assignments:
        section = data
        for step in assignment.path[:-1]:
            section = section.setdefault(step, {})
        section[assignment.path[-1]] = assignment.data()
    return data


def render(introduction: Sequence[str], todos: Sequence[str], assignments: Sequence[Assignment]) -> str:
    """Return the YAML. `todos` are those that belong to no setting; they come before the settings.

    The assignments of a section must be adjacent.
    """
    lines = [line for text in introduction for line in _comment(text, "")]
    lines += [line for todo in todos for line in _comment(f"TODO: {todo}", "")]
    section: tuple[str, ...] = ()
    for assignment in assignments:
        parent = assignment.path[:-1]
        common = _common_length(section, parent)
        if not common:
            lines.append("")
        for depth in range(common, len(parent)):
            lines.append(f"{'  ' * depth}{parent[depth]}:")
        section = parent
        lines += _render_assignment(assignment, "  " * len(parent))
    return "\n".join(lines) + "\n"


def _common_length(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def _render_assignment(assignment: Assignment, indent: str) -> Iterator[str]:
    for text in (assignment.remark, assignment.todo and f"TODO: {assignment.todo}"):
        if text:
            yield from _comment(text, indent)
    key, source = assignment.path[-1], _source_comment(", ".join(assignment.sources))
    if isinstance(assignment.value, list) and any(isinstance(item, Item) for item in assignment.value):
        yield f"{indent}{key}:{source}"
        for item in assignment.value:
            yield from _render_item(item, f"{indent}  ")
    else:
        yield f"{indent}{key}: {format_value(assignment.value)}{source}"


def _render_item(item: Item, indent: str) -> Iterator[str]:
    for index, (key, value) in enumerate(item.values.items()):
        comment = "" if index else _source_comment(item.comment)
        yield f"{indent}{'  ' if index else '- '}{key}: {format_value(value)}{comment}"


def _source_comment(text: str) -> str:
    return f"  # {sanitize(text)}" if text else ""


def _comment(text: str, indent: str) -> list[str]:
    width = max(_WIDTH - len(indent) - 2, 40)
    wrapped = textwrap.wrap(sanitize(text), width, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {'  ' if number else ''}{line}" for number, line in enumerate(wrapped)]


def format_value(value: Any) -> str:
    """Format a scalar, a list of scalars or a mapping of scalars on one line."""
    if isinstance(value, Mapping):
        pairs = (f"{_format_text(key)}: {format_value(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value) if isinstance(value, int) else _format_text(str(value))


def _format_text(text: str) -> str:
    """Format text without quotes if the settings loader then reads the same text."""
    if _PLAIN_TEXT.fullmatch(text):
        try:
            data, _ = parse_yaml(f"key: [{text}]", "text")
        except ConfigError:
            data = {}
        if data == {"key": [text]}:
            return text
    quoted: str = yaml.dump(text, default_style='"', allow_unicode=True, width=1 << 30)
    return quoted.rstrip("\n")

"""The settings as a tree of fields: find a field by its path, describe the values that it accepts, translate
pydantic's validation errors into a problem and a remedy for operators.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from controlplane.config.types import SettingError, TakesEffect, ValueFormat

SettingPath = tuple[str | int, ...]
Section = TypeVar("Section", bound=BaseModel)

_MAX_ECHO_LENGTH = 60
_TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def format_path(path: SettingPath) -> str:
    """Format a path as `health.sql.rise` or `nodes.0.address`; unprintable keys are escaped."""
    return ".".join(str(step) if str(step).isprintable() else ascii(step) for step in path)


def iter_settings(
    model: type[BaseModel], prefix: SettingPath = ()
) -> Iterator[tuple[SettingPath, FieldInfo]]:
    """Yield all settings below a section in order; a list (of nodes, for example) is one setting."""
    for name, field in model.model_fields.items():
        inner = section_model(field)
        if inner is None:
            yield (*prefix, name), field
        else:
            yield from iter_settings(inner, (*prefix, name))


def value_type(field: FieldInfo) -> Any:
    """Return the type of a field without `| None`."""
    if typing.get_origin(field.annotation) in (Union, types.UnionType):
        return next(part for part in typing.get_args(field.annotation) if part is not type(None))
    return field.annotation


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, or None if it is a setting."""
    kind = value_type(field)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def is_list(field: FieldInfo) -> bool:
    return typing.get_origin(value_type(field)) is tuple


def element_field(field: FieldInfo) -> FieldInfo | None:
    """Return the field of a list's items or of a mapping's values; None for other fields."""
    kind = value_type(field)
    if typing.get_origin(kind) not in (tuple, dict):
        return None
    return FieldInfo.from_annotation(typing.get_args(kind)[0 if is_list(field) else 1])


def find_field(model: type[BaseModel], path: SettingPath) -> FieldInfo | None:
    """Return the field at a path, also inside lists and mappings; None if there is none.

    As in pydantic's errors, `[key]` after a mapping's key means the key itself, not its value.
    """
    field: FieldInfo | None = FieldInfo.from_annotation(model)
    if path[-1:] == ("[key]",) and (mapping := find_field(model, path[:-2])):
        return FieldInfo.from_annotation(typing.get_args(value_type(mapping))[0])
    for step in path:
        if field is None:
            return None
        inner = section_model(field)
        field = inner.model_fields.get(str(step)) if inner else element_field(field)
    return field


def takes_effect(field: FieldInfo) -> TakesEffect:
    """Return when a change of this setting takes effect."""
    extra = field.json_schema_extra
    return typing.cast(TakesEffect, extra["change"]) if isinstance(extra, dict) else "now"


def with_defaults_of_reloadable(section: Section) -> Section:
    """Return a section with the defaults of all optional settings whose changes running Envoys apply.

    Lists and mappings of sections stay as they are.
    """
    changes: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            changes[name] = with_defaults_of_reloadable(value)
        elif takes_effect(field).startswith("now") and not field.is_required():
            element = element_field(field)
            if element is None or section_model(element) is None:
                changes[name] = field.get_default(call_default_factory=True)
    return section.model_copy(update=changes)


def describe_expected(field: FieldInfo) -> str:
    """Describe the values that a field accepts, in words that can follow "write": `a number from 1 to 5`."""
    kind = value_type(field)
    for part in reversed([*field.metadata, *getattr(kind, "__metadata__", ())]):
        if isinstance(part, ValueFormat):
            return part.text
    if inner := section_model(field):
        return f"a mapping with {', '.join(inner.model_fields)}"
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if element := element_field(field):
        prefix = "a list, each item" if is_list(field) else "a mapping of names to"
        return f"{prefix} {describe_expected(element)}"
    extra = field.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else ""
    return _TYPE_NAMES[kind] + (f" of {unit}" if unit else "") + _format_bounds(field)


def _format_bounds(field: FieldInfo) -> str:
    bounds = {
        name: getattr(part, name)
        for part in field.metadata
        for name in ("ge", "gt", "le")
        if hasattr(part, name)
    }
    if "gt" in bounds:
        return f" above {bounds['gt']} and at most {bounds['le']}"
    return f" from {bounds['ge']} to {bounds['le']}" if bounds else ""


@dataclass(frozen=True, slots=True)
class InvalidSetting:
    path: SettingPath
    problem: str
    remedy: str


def translate_error(model: type[BaseModel], error: ErrorDetails) -> InvalidSetting:
    """Translate one validation error of a model. `error` is an item of pydantic's `errors()`."""
    path: SettingPath = error["loc"]
    field = find_field(model, path)
    if path[-1:] == ("[key]",):  # pydantic's mark of a mapping's key
        path = path[:-1]
    if error["type"] == "extra_forbidden":
        return InvalidSetting(path, "there is no such setting", _suggest_key(model, path))
    cause = error.get("ctx", {}).get("error")
    remedy = ""
    if isinstance(cause, SettingError):
        path += tuple(int(step) if step.isdigit() else step for step in cause.key.split(".") if step)
        problem, remedy = cause.problem, cause.remedy
        field = find_field(model, path) if cause.key else field
    elif error["type"] == "missing":
        problem = "is missing"
    else:
        is_text_expected = error["type"] == "string_type" and not isinstance(error["input"], dict | list)
        problem = f"{format_value(error['input'])} is {'not text' if is_text_expected else 'not allowed'}"
        remedy = "put it in quotes" if is_text_expected else ""
        if field and _may_hold_secret(field):
            problem = "the value is not allowed"  # not shown: it may be the secret itself
    return InvalidSetting(
        path, problem, remedy or (f"write {describe_expected(field)}" if field else "remove it")
    )


def _may_hold_secret(field: FieldInfo) -> bool:
    """Return whether the field is a secret, or a list, mapping or section with a secret."""
    section, element = section_model(field), element_field(field)
    inner = section.model_fields.values() if section else [element] if element else []
    return value_type(field) is SecretStr or any(map(_may_hold_secret, inner))


def format_value(value: Any) -> str:
    """Format a value as its author wrote it, on one line and shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_ECHO_LENGTH else f"{text[:_MAX_ECHO_LENGTH]}..."


def _suggest_key(model: type[BaseModel], path: SettingPath) -> str:
    """Suggest a similar key in the same section, the same key elsewhere, or list the known keys."""
    parent, name = path[:-1], str(path[-1])
    field = find_field(model, parent)
    section = section_model(field) if field else None
    names = list(section.model_fields) if section else []
    candidates = [(*parent, key) for key in difflib.get_close_matches(name.lower(), names, n=1)]
    candidates = candidates or [leaf for leaf, _ in iter_settings(model) if leaf[-1] == name.lower()][:4]
    if candidates:
        return f"did you mean {' or '.join(map(format_path, candidates))}?"
    return f"the known settings here are {', '.join(names)}"

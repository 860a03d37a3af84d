"""The settings as a tree of fields: find a field by its path, and describe the values that it accepts."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, Union

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from controlplane.config.types import TakesEffect, ValueFormat

SettingPath = tuple[str | int, ...]

_TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    SecretStr: "text",
    FilePath: "a path",
}


def format_path(path: SettingPath) -> str:
    """Format a path as `health.sql.rise` or `nodes.0.address`; always one line, with odd keys escaped."""
    return ".".join(str(step) if str(step).isprintable() else ascii(step) for step in path)


def leaves(model: type[BaseModel], prefix: SettingPath = ()) -> Iterator[tuple[SettingPath, FieldInfo]]:
    """Yield all settings below a section in order; a list (of nodes, for example) is one setting."""
    for name, field in model.model_fields.items():
        inner = section_model(field)
        if inner is None:
            yield (*prefix, name), field
        else:
            yield from leaves(inner, (*prefix, name))


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, or None if it is a setting."""
    kind = _without_none(field.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item_field(field: FieldInfo) -> FieldInfo | None:
    """Return the field of a list's items, or None if the field is not a list."""
    kind = _without_none(field.annotation)
    return FieldInfo.from_annotation(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else None


def is_mapping(field: FieldInfo) -> bool:
    """Whether the field is a mapping of names to values."""
    return typing.get_origin(_without_none(field.annotation)) is dict


def mapping_value_field(field: FieldInfo) -> FieldInfo | None:
    """Return the field of a mapping's values, or None if the field is not a mapping."""
    if not is_mapping(field):
        return None
    return FieldInfo.from_annotation(typing.get_args(_without_none(field.annotation))[1])


def find_field(model: type[BaseModel], path: SettingPath) -> FieldInfo | None:
    """Return the field at a path, also inside lists and mappings; None if there is none."""
    field = FieldInfo.from_annotation(model)
    for step in path:
        inner = section_model(field)
        kind = _without_none(field.annotation)
        member = item_field(field)
        if inner is not None and step in inner.model_fields:
            field = inner.model_fields[str(step)]
        elif member is not None and isinstance(step, int):
            field = member
        elif typing.get_origin(kind) is dict:
            field = FieldInfo.from_annotation(typing.get_args(kind)[1])
        else:
            return None
    return field


def takes_effect(field: FieldInfo) -> TakesEffect:
    """Return when a change of this setting takes effect."""
    extra = field.json_schema_extra
    return (
        typing.cast(TakesEffect, extra["change"]) if isinstance(extra, dict) and "change" in extra else "now"
    )


def type_name(field: FieldInfo) -> str:
    """Describe the type of a field without limits: `a whole number`, `a list`."""
    kind = _without_none(field.annotation)
    if section_model(field) is not None:
        return "a section"
    if item_field(field) is not None:
        return "a list"
    if (value_field := mapping_value_field(field)) is not None:
        return f"a mapping of names to {'sections' if section_model(value_field) else 'text'}"
    return "a plain number" if _is_digits(field) else _TYPE_NAMES.get(kind, "a value")


def describe_expected(field: FieldInfo) -> str:
    """Describe the values of a field with limits and unit, to follow "write": `a number from 1 to 5`."""
    value_format = _value_format(field)
    if value_format is not None:
        return value_format
    kind = _without_none(field.annotation)
    inner = section_model(field)
    if inner is not None:
        return f"a section with {', '.join(inner.model_fields)}"
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, choices(field)))}"
    member = item_field(field)
    if member is not None:
        item_model = section_model(member)
        item_text = (
            f"a mapping with {', '.join(item_model.model_fields)}"
            if item_model
            else describe_expected(member)
        )
        return f"a list, each item {item_text}"
    if _is_digits(field):
        return "digits without leading zeros, such as 5"
    extra = field.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else ""
    return type_name(field) + (f" of {unit}" if unit else "") + _format_bounds(field)


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """Return the allowed values of a field with a fixed set of values; else empty."""
    kind = _without_none(field.annotation)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _is_digits(field: FieldInfo) -> bool:
    """Whether the field is a number stored as text; no other text has a pattern."""
    return any(getattr(part, "pattern", None) for part in field.metadata)


def _format_bounds(field: FieldInfo) -> str:
    low: float | None = None
    high: float | None = None
    is_exclusive = False
    for part in field.metadata:
        if isinstance(part, annotated_types.Ge):
            low = typing.cast(float, part.ge)
        elif isinstance(part, annotated_types.Gt):
            low, is_exclusive = typing.cast(float, part.gt), True
        elif isinstance(part, annotated_types.Le):
            high = typing.cast(float, part.le)
    if low is not None and high is not None:
        return f" above {low} and at most {high}" if is_exclusive else f" from {low} to {high}"
    if low is not None:
        return f", {'above' if is_exclusive else 'at least'} {low}"
    return ""


def _value_format(field: FieldInfo) -> str | None:
    kind = _without_none(field.annotation)
    parts = [*field.metadata, *getattr(kind, "__metadata__", ())]
    return next((part.text for part in parts if isinstance(part, ValueFormat)), None)


def _without_none(annotation: Any) -> Any:
    """Return the type without `| None`."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation

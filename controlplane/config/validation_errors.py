"""Translate pydantic's validation errors into a problem and a remedy for operators."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from controlplane.config import schema
from controlplane.config.schema import SettingPath, format_path
from controlplane.config.types import SettingError

_MAX_ECHO_LENGTH = 60


@dataclass(frozen=True, slots=True)
class InvalidSetting:
    """One unusable setting."""

    path: SettingPath
    problem: str
    remedy: str


def translate_error(model: type[BaseModel], error: ErrorDetails) -> InvalidSetting:
    """Translate one validation error of a model. `error` is an item of pydantic's `errors()`."""
    path: SettingPath = error["loc"]
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return InvalidSetting(path, "there is no such setting", _suggest_key(model, path))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):
        subpath = tuple(int(step) if step.isdigit() else step for step in cause.key.split(".") if step)
        path = (*path, *subpath)
        return InvalidSetting(path, cause.problem, cause.remedy or _expected_remedy(model, path))
    if kind == "missing":
        return InvalidSetting(path, "is missing", _expected_remedy(model, path))
    if kind == "string_type" and not isinstance(value, (dict, list)):
        return InvalidSetting(path, f"{format_value(value)} is not text", "put it in quotes")
    field = schema.find_field(model, path)
    if kind in ("greater_than", "greater_than_equal"):
        problem = f"{format_value(value)} is too small"
    elif kind in ("less_than", "less_than_equal"):
        problem = f"{format_value(value)} is too large"
    elif kind == "literal_error":
        problem = f"{format_value(value)} is not an allowed value"
    else:
        problem = f"{format_value(value)} is not {schema.type_name(field) if field else 'a value'}"
    return InvalidSetting(path, problem, _expected_remedy(model, path))


def format_value(value: Any) -> str:
    """Format a value as it was written, on one line and shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_ECHO_LENGTH else f"{text[:_MAX_ECHO_LENGTH]}..."


def _expected_remedy(model: type[BaseModel], path: SettingPath) -> str:
    field = schema.find_field(model, path)
    return f"write {schema.describe_expected(field)}" if field else "remove it"


def _suggest_key(model: type[BaseModel], path: SettingPath) -> str:
    """Suggest a similar key in the same section, the same key elsewhere, or list the known keys."""
    parent, name = path[:-1], str(path[-1])
    parent_field = schema.find_field(model, parent)
    section = schema.section_model(parent_field) if parent_field else None
    names = list(section.model_fields) if section else []
    similar = difflib.get_close_matches(name.lower(), names, n=1)
    if similar:
        return f"did you mean {format_path((*parent, similar[0]))}?"
    elsewhere = [format_path(leaf) for leaf, _ in schema.leaves(model) if leaf[-1] == name.lower()]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:4])}?"
    return f"the known settings here are {', '.join(names)}"

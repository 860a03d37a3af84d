"""What pydantic found wrong with the settings, in words of ours: what is wrong, and what would be right."""

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
    """One setting that cannot be used."""

    path: SettingPath
    problem: str
    remedy: str


def translate_error(model: type[BaseModel], error: ErrorDetails) -> InvalidSetting:
    """One error of pydantic's about a model, told for a person. `error` is an item of `errors()`."""
    path: SettingPath = error["loc"]
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return InvalidSetting(path, "there is no such setting", _suggest_key(model, path))
    wrong = error.get("ctx", {}).get("error")
    if isinstance(wrong, SettingError):
        steps = tuple(int(step) if step.isdigit() else step for step in wrong.key.split(".") if step)
        path = (*path, *steps)
        return InvalidSetting(path, wrong.problem, wrong.remedy or _expected_remedy(model, path))
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
        problem = f"{format_value(value)} is not one of the values to choose from"
    else:
        problem = f"{format_value(value)} is not {schema.type_name(field) if field else 'a value'}"
    return InvalidSetting(path, problem, _expected_remedy(model, path))


def format_value(value: Any) -> str:
    """A value as its writer would recognise it, on one line and never long."""
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
    """Where an unknown key may belong: a similar name beside it, the same name elsewhere, or the list."""
    parent, name = path[:-1], str(path[-1])
    holder = schema.find_field(model, parent)
    section = schema.section_model(holder) if holder else None
    names = list(section.model_fields) if section else []
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if close:
        return f"did you mean {format_path((*parent, close[0]))}?"
    elsewhere = [format_path(leaf) for leaf, _ in schema.leaves(model) if leaf[-1] == name.lower()]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:4])}?"
    return f"known here are {', '.join(names)}"

"""What pydantic found wrong with the settings, in words of ours: what is wrong, and what would be right."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from controlplane.config import schema
from controlplane.config.schema import Path, dotted
from controlplane.config.types import Wrong

_LONGEST_ECHO = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """One setting that cannot be used."""

    path: Path
    problem: str
    remedy: str


def fault(model: type[BaseModel], error: ErrorDetails) -> Fault:
    """One error of pydantic's about a model, told for a person. `error` is an item of `errors()`."""
    path: Path = error["loc"]
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return Fault(path, "there is no such setting", _instead(model, path))
    wrong = error.get("ctx", {}).get("error")
    if isinstance(wrong, Wrong):
        steps = tuple(int(step) if step.isdigit() else step for step in wrong.key.split(".") if step)
        path = (*path, *steps)
        return Fault(path, wrong.problem, wrong.remedy or _write(model, path))
    if kind == "missing":
        return Fault(path, "is missing", _write(model, path))
    if kind == "string_type" and not isinstance(value, (dict, list)):
        return Fault(path, f"{shown(value)} is not text", "put it in quotes")
    field = schema.find(model, path)
    if kind in ("greater_than", "greater_than_equal"):
        problem = f"{shown(value)} is too small"
    elif kind in ("less_than", "less_than_equal"):
        problem = f"{shown(value)} is too large"
    elif kind == "literal_error":
        problem = f"{shown(value)} is not one of the values to choose from"
    else:
        problem = f"{shown(value)} is not {schema.noun(field) if field else 'a value'}"
    return Fault(path, problem, _write(model, path))


def shown(value: Any) -> str:
    """A value as its writer would recognise it, on one line and never long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}..."


def _write(model: type[BaseModel], path: Path) -> str:
    field = schema.find(model, path)
    return f"write {schema.expected(field)}" if field else "remove it"


def _instead(model: type[BaseModel], path: Path) -> str:
    """Where an unknown key may belong: a similar name beside it, the same name elsewhere, or the list."""
    above, name = path[:-1], str(path[-1])
    holder = schema.find(model, above)
    section = schema.group(holder) if holder else None
    names = list(section.model_fields) if section else []
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if close:
        return f"did you mean {dotted((*above, close[0]))}?"
    elsewhere = [dotted(leaf) for leaf, _ in schema.leaves(model) if leaf[-1] == name.lower()]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:4])}?"
    return f"known here are {', '.join(names)}"

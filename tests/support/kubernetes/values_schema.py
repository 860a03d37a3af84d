"""Update the schema of the chart's `config`: `python -m tests.support.kubernetes.values_schema`.

The rest of `values.schema.json` is written by hand. `config` has all of Tidevoy's settings except those that
the chart sets, so that Helm finds a wrong key or value before anything is installed.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from controlplane.config import schema
from controlplane.config.schema import SettingPath
from controlplane.config.settings import Settings

CHART = Path(__file__).parents[3] / "deploy/helm/tidevoy"
VALUES_SCHEMA = CHART / "values.schema.json"

SET_BY_CHART = frozenset(
    {
        "api.listen",
        "api.tls",
        "api.tokens",  # from a Secret
        "envoy_health",
        "replicas.advertise",
        "replicas.enabled",
        "replicas.name",
        "sql.listen",
        "state_dir",
        "xds.listen",
        "xds.tls",
    }
)
"""Paths of the settings and sections that values cannot contain."""

_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum"}


def render_schema(text: str) -> str:
    """Return `values.schema.json` with the current settings."""
    values_schema = json.loads(text)
    values_schema["properties"]["config"] = _section(Settings, ())
    return json.dumps(values_schema, indent=1, ensure_ascii=False) + "\n"


def _section(model: type[BaseModel], path: SettingPath) -> dict[str, Any]:
    properties = {
        name: _setting(field, (*path, name))
        for name, field in model.model_fields.items()
        if schema.format_path((*path, name)) not in SET_BY_CHART
    }
    # A key without a value means its default.
    described: dict[str, Any] = {"type": ["object", "null"], "additionalProperties": False}
    if required := [name for name, field in model.model_fields.items() if field.is_required()]:
        described["required"] = required
    return described | {"properties": properties}


def _setting(field: FieldInfo, path: SettingPath) -> dict[str, Any]:
    if inner := schema.section_model(field):
        return _section(inner, path)
    described = _value(field, path)
    if field.description:
        described["description"] = " ".join(field.description.split())
    if not field.is_required():
        described = _or_null(described)
    return described


def _value(field: FieldInfo, path: SettingPath) -> dict[str, Any]:
    if inner := schema.section_model(field):
        return _section(inner, path) | {"type": "object"}
    kind = schema.value_type(field)
    if typing.get_origin(kind) is Literal:
        return {"enum": list(typing.get_args(kind))}
    if (element := schema.element_field(field)) is not None:
        if schema.is_list(field):
            return {"type": "array", "items": _value(element, path)}
        return {"type": "object", "additionalProperties": _value(element, path)}
    bounds = {
        _BOUNDS[name]: getattr(part, name)
        for part in field.metadata
        for name in _BOUNDS
        if hasattr(part, name)
    }
    return {"type": _type_name(kind, path)} | bounds


def _type_name(kind: Any, path: SettingPath) -> str | list[str]:
    while typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    names: dict[Any, str | list[str]] = {bool: "boolean", int: "integer", float: "number"}
    if path == ("pd", "keyspace"):
        return ["string", "integer"]
    if kind in names:
        return names[kind]
    assert kind is SecretStr or issubclass(kind, str | Path), f"{schema.format_path(path)}: {kind}"
    return "string"


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    if "enum" in described:
        return described | {"enum": [*described["enum"], None]}
    kinds = described["type"]
    return described | {"type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}


def main() -> None:
    """Write the file."""
    VALUES_SCHEMA.write_text(render_schema(VALUES_SCHEMA.read_text()))


if __name__ == "__main__":
    main()

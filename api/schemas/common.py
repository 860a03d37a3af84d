"""The base classes of requests and responses, and the field types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticUndefined

from controlplane import address as addresses

MAX_LABELS = 64
MAX_DEADLINE_SECONDS = 604_800.0  # a week


class StrictRequest(BaseModel):
    """A request body without unknown fields and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StrictQuery(BaseModel):
    """Query parameters without unknown names."""

    model_config = ConfigDict(extra="forbid")


class ResponseModel(BaseModel):
    """A response, or a part of one, that `model_validate` reads from an object's attributes.

    Unix seconds become times in UTC.
    """

    model_config = ConfigDict(from_attributes=True, json_schema_serialization_defaults_required=True)


def attribute(path: str, description: str | None = None, *, default: Any = PydanticUndefined) -> Any:
    """Return a response field that is read from `path`, such as `plan.node.address`.

    `default` is the value if an object in the path is None.
    """
    return Field(default, validation_alias=AliasPath(*path.split(".")), description=description)


def address_pattern() -> str:
    """Return the rules of `controlplane.address` as a regular expression, for validation by clients."""
    label = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
    name = rf"{label}(?:\.{label})*\.?"
    group = "[0-9A-Fa-f]{1,4}"
    shortened = "|".join(f"(?:{group}:){{1,{n}}}(?::{group}){{1,{7 - n}}}" for n in range(1, 7))
    ipv6 = f"(?:{group}:){{7}}{group}|(?:{group}:){{1,7}}:|:(?::{group}){{1,7}}|::|{shortened}"
    port = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
    return rf"^(?:{name}|\[(?:{ipv6})\]):{port}$"


def _to_canonical_address(value: str) -> str:
    return addresses.join(*addresses.split(value))


def to_integer(value: Any) -> Any:
    """Convert an integral float to int: JSON Schema accepts `7.0` as an integer, and some clients send it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Address = Annotated[
    str,
    AfterValidator(_to_canonical_address),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": address_pattern(),
            "maxLength": 255,
            "description": "`host:port`; an IPv6 host is in brackets.",
            "examples": ["tidb-0.tidb-peer:4000", "[fd00::1]:4000"],
        }
    ),
]
Labels = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=256)],
        Annotated[str, StringConstraints(max_length=256)],
    ],
    Field(max_length=MAX_LABELS),
]
Integer = Annotated[int, BeforeValidator(to_integer)]
Seconds = Annotated[float, Field(ge=0, le=MAX_DEADLINE_SECONDS, allow_inf_nan=False)]

OptionalText = Annotated[str | None, BeforeValidator(lambda text: text or None)]
"""A text in a response; null if the text is empty."""
Ratio = Annotated[float, AfterValidator(lambda value: round(value, 4))]

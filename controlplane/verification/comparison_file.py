"""Reads the JSON of a comparison, which `tidevoy-replay compare` writes."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from controlplane.errors import TidevoyError
from controlplane.model.comparison import Comparison

_ADAPTER = TypeAdapter(Comparison)


class InvalidComparison(TidevoyError):
    """The JSON is not a comparison of replays."""


def parse_comparison(text: str | bytes) -> Comparison:
    """Return the comparison in a JSON text; unknown keys are skipped. Raises InvalidComparison."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the text"
        raise InvalidComparison(f"this is not a comparison of replays: {field}: {first['msg']}") from None

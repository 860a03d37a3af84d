"""Settings as nested mappings, one laid over another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, mapping by mapping."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result

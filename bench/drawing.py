"""SVG from the templates of this package, and the room that text takes in it."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_ELLIPSIS = "…"


def render(template: str, **values: Any) -> str:
    """A template of `bench/templates` with values filled in; what they hold is escaped for XML."""
    environment = Environment(
        loader=PackageLoader("bench"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values).lstrip()


def fitted(text: str, width: float, letter: float) -> str:
    """Text cut to so many pixels, by the mean width of its letters; empty when not even two have room."""
    room = int(width / letter)
    if len(text) <= room:
        return text
    return text[: room - 1] + _ELLIPSIS if room > 1 else ""

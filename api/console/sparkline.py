"""A small line for a row of numbers, as the points of an SVG polyline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 28
_MARGIN = 2


def polyline_points(values: Sequence[float | None], slots: int) -> list[str]:
    """`points` of each stretch that is known, newest at the right edge; the scale begins at 0."""
    known = [value for value in values if value is not None]
    top = max(known, default=0.0) or 1.0
    step = WIDTH / max(slots - 1, 1)
    found: list[str] = []
    stretch: list[str] = []
    for index, value in enumerate(values, start=slots - len(values)):
        if value is None:
            found += _polyline(stretch)
            stretch = []
        else:
            height = HEIGHT - _MARGIN - value / top * (HEIGHT - 2 * _MARGIN)
            stretch.append(f"{index * step:.1f},{height:.1f}")
    return found + _polyline(stretch)


def _polyline(stretch: list[str]) -> list[str]:
    return [" ".join(stretch)] if len(stretch) > 1 else []

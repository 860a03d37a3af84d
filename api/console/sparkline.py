"""Sparklines: convert a series of numbers to the points of SVG polylines. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 28
_MARGIN = 2


def polyline_points(values: Sequence[float | None], slots: int) -> list[str]:
    """Return the `points` of each run of known values, newest at the right; the scale starts at 0."""
    known_values = [value for value in values if value is not None]
    max_value = max(known_values, default=0.0) or 1.0
    step = WIDTH / max(slots - 1, 1)
    lines: list[str] = []
    segment: list[str] = []
    for index, value in enumerate(values, start=slots - len(values)):
        if value is None:
            lines += _polyline(segment)
            segment = []
        else:
            height = HEIGHT - _MARGIN - value / max_value * (HEIGHT - 2 * _MARGIN)
            segment.append(f"{index * step:.1f},{height:.1f}")
    return lines + _polyline(segment)


def _polyline(segment: list[str]) -> list[str]:
    return [" ".join(segment)] if len(segment) > 1 else []

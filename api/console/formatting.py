"""Format numbers and times for the console. Pure functions."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = "\N{EN DASH}"
_THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"


def format_count(value: float | None) -> str:
    """Format an integer: `12,345`."""
    return UNKNOWN if value is None else f"{round(value):,}"


def format_rate(value: float | None) -> str:
    """Format a rate per second: `0.4`, `12`, `3,456`."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if 0 < value < 9.95 else format_count(value)


def format_latency(seconds: float | None) -> str:
    """Format a latency: `0.42 ms`, `12 ms`, `1.20 s`."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 0.9995:
        return f"{seconds:.2f}{_THIN_SPACE}s"
    milliseconds = seconds * 1000
    digits = 0 if milliseconds >= 9.95 else 2
    return f"{milliseconds:.{digits}f}{_THIN_SPACE}ms"


def format_percent(share: float | None) -> str:
    """Format a ratio as a percentage: `42 %`."""
    return UNKNOWN if share is None else f"{share * 100:.0f}{_THIN_SPACE}%"


def format_duration(seconds: float | None) -> str:
    """Format a duration: `45 s`, `2 min 5 s`, `1 h 3 min`, `2 d 4 h`."""
    if seconds is None:
        return UNKNOWN
    total = max(0, round(seconds))
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for unit, size, smaller_unit, smaller_size in units:
        if total >= size:
            count, remainder = total // size, total % size // smaller_size
            return f"{count} {unit} {remainder} {smaller_unit}" if remainder else f"{count} {unit}"
    return f"{total} s"


def format_time(timestamp: float | None) -> str:
    """Format a time for users: `2026-01-31 12:05:09 UTC`."""
    return UNKNOWN if timestamp is None else f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_iso_time(timestamp: float) -> str:
    """Format a time as ISO 8601 in UTC, with the precision of a second."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def humanize(name: str) -> str:
    """Replace the underscores of a name with spaces."""
    return name.replace("_", " ")

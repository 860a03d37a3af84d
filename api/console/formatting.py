"""Numbers and times as the console writes them. Pure."""

from __future__ import annotations

from api.schemas.common import utc_datetime

UNKNOWN = "\N{EN DASH}"
_THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"


def format_count(value: float | None) -> str:
    """A whole number: `12,345`."""
    return UNKNOWN if value is None else f"{round(value):,}"


def format_rate(value: float | None) -> str:
    """A number of something a second: `0.4`, `12`, `3,456`."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if 0 < value < 9.95 else format_count(value)


def format_latency(seconds: float | None) -> str:
    """A short time: `0.42 ms`, `12 ms`, `1.20 s`."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 0.9995:
        return f"{seconds:.2f}{_THIN_SPACE}s"
    thousandths = seconds * 1000
    return f"{thousandths:.0f}{_THIN_SPACE}ms" if thousandths >= 9.95 else f"{thousandths:.2f}{_THIN_SPACE}ms"


def format_percent(share: float | None) -> str:
    """A share of 1: `42 %`."""
    return UNKNOWN if share is None else f"{share * 100:.0f}{_THIN_SPACE}%"


def format_duration(seconds: float | None) -> str:
    """How long something takes: `45 s`, `2 min 5 s`, `1 h 3 min`, `2 d 4 h`."""
    if seconds is None:
        return UNKNOWN
    total = max(0, round(seconds))
    for unit, size, below, smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if total >= size:
            remainder = total % size // smaller
            return f"{total // size} {unit} {remainder} {below}" if remainder else f"{total // size} {unit}"
    return f"{total} s"


def format_time(timestamp: float | None) -> str:
    """A time for people, in UTC: `2026-01-31 12:05:09 UTC`."""
    return UNKNOWN if timestamp is None else f"{utc_datetime(timestamp):%Y-%m-%d %H:%M:%S} UTC"


def format_iso_time(timestamp: float) -> str:
    """A time for programs."""
    return utc_datetime(timestamp).isoformat(timespec="seconds").replace("+00:00", "Z")


def humanize(name: str) -> str:
    """A name with underscores as people write it."""
    return name.replace("_", " ")

"""Numbers and times as the console writes them. Pure."""

from __future__ import annotations

from api.schemas.common import moment

NOT_KNOWN = "\N{EN DASH}"
_THIN = "\N{NARROW NO-BREAK SPACE}"


def count(value: float | None) -> str:
    """A whole number: `12,345`."""
    return NOT_KNOWN if value is None else f"{round(value):,}"


def rate(value: float | None) -> str:
    """A number of something a second: `0.4`, `12`, `3,456`."""
    if value is None:
        return NOT_KNOWN
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)


def latency(seconds: float | None) -> str:
    """A short time: `0.42 ms`, `12 ms`, `1.20 s`."""
    if seconds is None:
        return NOT_KNOWN
    if seconds >= 0.9995:
        return f"{seconds:.2f}{_THIN}s"
    thousandths = seconds * 1000
    return f"{thousandths:.0f}{_THIN}ms" if thousandths >= 9.95 else f"{thousandths:.2f}{_THIN}ms"


def percent(share: float | None) -> str:
    """A share of 1: `42 %`."""
    return NOT_KNOWN if share is None else f"{share * 100:.0f}{_THIN}%"


def duration(seconds: float | None) -> str:
    """How long something takes: `45 s`, `2 min 5 s`, `1 h 3 min`, `2 d 4 h`."""
    if seconds is None:
        return NOT_KNOWN
    whole = max(0, round(seconds))
    for unit, size, below, smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {below}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def clock(at: float | None) -> str:
    """A time for people, in UTC: `2026-01-31 12:05:09 UTC`."""
    return NOT_KNOWN if at is None else f"{moment(at):%Y-%m-%d %H:%M:%S} UTC"


def machine(at: float) -> str:
    """A time for programs."""
    return moment(at).isoformat(timespec="seconds").replace("+00:00", "Z")


def words(name: str) -> str:
    """A name with underscores as people write it."""
    return name.replace("_", " ")

"""Formats statistics of statements as rows of tables. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli.output import format_time

HEADERS = (
    *("SHARE", "TIME", "COUNT", "PER SECOND", "AVERAGE", "P95", "MAX", "ERRORS", "ROWS", "DIGEST"),
    "STATEMENT",
)
GROUP_HEADERS = ("SHARE", "TIME", "COUNT", "PER SECOND", "AVERAGE", "P95", "MAX", "ERRORS", "ROWS")
LATENCY_HEADERS = ("LATENCY", "COUNT", "SHARE", "")
MAX_TEXT_CHARS = 2048
DIGEST_DIGITS = 12  # enough to name a statement with `tidevoy top --digest`

_BAR_CHARS = 40
_OTHERS = "all other statements"
_SECONDS_PER_MINUTE = 60


def statement_rows(answer: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row per statement of `GET /v1/statements`, and one for all others if there are any."""
    rows = [
        (*_numbers(entry), entry["digest"][:DIGEST_DIGITS], " ".join((entry["text"] or "not known").split()))
        for entry in answer["statements"]
    ]
    if answer["others"]["count"]:
        rows.append((*_numbers(answer["others"]), "-", _OTHERS))
    return rows


def group_row(entry: Mapping[str, Any], by: str) -> tuple[str, ...]:
    """Return the row of a statement's executions by one user or on one node."""
    return (entry[by] or "-", *_numbers(entry))


def latency_rows(latency: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row per bucket, from the first to the last one that is not empty."""
    used = [index for index, bucket in enumerate(latency) if bucket["count"]]
    if not used:
        return []
    total = sum(bucket["count"] for bucket in latency)
    highest = max(bucket["count"] for bucket in latency)
    lower_bounds = [0.0, *(bucket["up_to_seconds"] for bucket in latency)]
    return [
        (
            _bucket_name(lower_bounds[index], latency[index]["up_to_seconds"]),
            str(latency[index]["count"]),
            f"{latency[index]['count'] / total:.1%}",
            "#" * round(_BAR_CHARS * latency[index]["count"] / highest),
        )
        for index in range(used[0], used[-1] + 1)
    ]


def describe_period(answer: Mapping[str, Any]) -> str:
    """Return which time an answer covers, and how many statements it leaves out."""
    shown, total = len(answer["statements"]), answer["total"]
    left_out = f"; {shown} of {total} statements are shown" if shown < total else ""
    return (
        f"{format_seconds(answer['window_seconds'])} since {format_time(answer['since'])}, sums of all Envoys"
        f"{left_out}"
    )


def format_seconds(seconds: float | None) -> str:
    """Format a time with three digits: `0.42ms`, `12.3ms`, `4.56s`, `12.3min`; None gives `-`."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)}ms"
    if seconds < 99.95:
        return f"{_three_digits(seconds)}s"
    return f"{_three_digits(seconds / _SECONDS_PER_MINUTE)}min"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _numbers(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{entry['share']:.1%}",
        format_seconds(entry["seconds"]),
        str(entry["count"]),
        _three_digits(entry["per_second"]),
        format_seconds(entry["average_seconds"]),
        format_seconds(entry["p95_seconds"]),
        format_seconds(entry["max_seconds"]),
        str(entry["errors"]),
        str(entry["rows"]),
    )


def _bucket_name(lower: float, upper: float | None) -> str:
    if upper is None:
        return f"over {lower:g}s"
    return f"{_bound(lower)} to {_bound(upper)}"


def _bound(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"

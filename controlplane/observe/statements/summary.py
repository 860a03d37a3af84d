"""Summarizes the statistics of a period per statement. Pure functions; they may run in a thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from controlplane.model.statements import (
    COUNT,
    ERRORS,
    LATENCY_COLUMNS,
    MAX_MICROSECONDS,
    MICROSECONDS,
    ROWS,
    SortKey,
    StatementCounts,
    StatementKey,
    StatementQuery,
    StatementSummaries,
    StatementSummary,
    StatementWindow,
    add_counts,
    new_counts,
)
from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS, quantile

_MAX_NAMES = 20  # users and nodes that a summary lists
_NO_DIGEST = ""


def latency_quantile(q: float, latency: Sequence[float], max_seconds: float) -> float | None:
    """Return the latency quantile `q` in seconds; None without executions.

    `latency` are executions per bucket, not cumulative. The value is interpolated linearly in its bucket, and
    is never more than the highest latency, `max_seconds`.
    """
    buckets = tuple(int(count) for count in itertools.accumulate(latency))
    in_bounds, total = buckets[-2], buckets[-1]
    if not total:
        return None
    rank = q * total
    last_bound = LATENCY_BOUNDS_SECONDS[-1]
    if rank > in_bounds:
        upper = max(max_seconds, last_bound)
        return last_bound + (upper - last_bound) * (rank - in_bounds) / (total - in_bounds)
    value = quantile(q, buckets)
    return value if value is None or not max_seconds else min(value, max_seconds)


def summarize(window: StatementWindow, query: StatementQuery) -> StatementSummaries:
    """Return the statements that match the query, sorted and limited."""
    sums: dict[tuple[str, str], StatementCounts] = {}  # by digest, and user or node if the query splits
    users: dict[tuple[str, str], dict[str, float]] = {}
    nodes: dict[tuple[str, str], dict[str, float]] = {}
    total_time = 0.0
    for key, counts in _matching_rows(window, query):
        part = "" if query.by is None or not key.digest else getattr(key, query.by)
        entry = (key.digest, part)
        before = sums.get(entry)
        sums[entry] = counts if before is None else add_counts(before, counts)
        time = counts[MICROSECONDS]
        total_time += time
        for names, name in ((users, key.user), (nodes, key.node)):
            of_entry = names.setdefault(entry, {})
            of_entry[name] = of_entry.get(name, 0.0) + time

    def summary(entry: tuple[str, str], counts: StatementCounts) -> StatementSummary:
        digest, part = entry
        return StatementSummary(
            counts=counts,
            share=counts[MICROSECONDS] / total_time if total_time else 0.0,
            per_second=counts[COUNT] / window.seconds,
            users=_largest(users.get(entry, {})),
            nodes=_largest(nodes.get(entry, {})),
            digest=digest,
            text=window.texts.get(digest),
            user=part if query.by == "user" and digest else None,
            node=part if query.by == "node" and digest else None,
        )

    others = summary((_NO_DIGEST, ""), sums.pop((_NO_DIGEST, ""), new_counts()))
    sort_value = _SORT_VALUES[query.sort]
    ordered = sorted(sums, key=lambda entry: (-sort_value(sums[entry]), entry))
    return StatementSummaries(
        tuple(summary(entry, sums[entry]) for entry in ordered[: query.limit]), others, len(sums)
    )


def _matching_rows(
    window: StatementWindow, query: StatementQuery
) -> Iterable[tuple[StatementKey, StatementCounts]]:
    for rows in window.slots:
        for key, counts in rows.items():
            if (
                (query.user is None or key.user == query.user)
                and (query.node is None or key.node == query.node)
                and (query.envoy is None or key.envoy == query.envoy)
                and (query.digest is None or key.digest.startswith(query.digest))
            ):
                yield key, counts


def _largest(seconds_by_name: Mapping[str, float]) -> tuple[str, ...]:
    names = sorted(filter(None, seconds_by_name), key=lambda name: (-seconds_by_name[name], name))
    return tuple(names[:_MAX_NAMES])


def _p95(counts: StatementCounts) -> float:
    return latency_quantile(0.95, counts[LATENCY_COLUMNS], counts[MAX_MICROSECONDS] / 1e6) or 0.0


_SORT_VALUES: Mapping[SortKey, Callable[[StatementCounts], float]] = {
    "time": lambda counts: counts[MICROSECONDS],
    "count": lambda counts: counts[COUNT],
    "errors": lambda counts: counts[ERRORS],
    "rows": lambda counts: counts[ROWS],
    "p95": _p95,
    "max": lambda counts: counts[MAX_MICROSECONDS],
}

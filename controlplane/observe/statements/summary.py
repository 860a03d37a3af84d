"""Summarizes the statistics of a period per statement. Pure functions; they may run in a thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeAlias

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
    add_to,
    new_counts,
)
from controlplane.model.traffic import LATENCY_BOUNDS_SECONDS, quantile

_MAX_NAMES = 20  # users and nodes that a summary lists

Entry: TypeAlias = tuple[str, str]
"""A digest, and the user or node if the query splits by it."""

_OTHERS: Entry = ("", "")


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
    rows = list(_matching_rows(window, query))
    sums: dict[Entry, StatementCounts] = {}
    for key, counts in rows:
        add_to(sums, _entry_of(key, query), counts)
    total_time = sum(counts[MICROSECONDS] for counts in sums.values())
    others = sums.pop(_OTHERS, new_counts())
    sort_value = _SORT_VALUES[query.sort]
    ordered = sorted(sums, key=lambda entry: (-sort_value(sums[entry]), entry))[: query.limit]
    names = _largest_names(rows, query, {*ordered, _OTHERS})

    def summary(entry: Entry, counts: StatementCounts) -> StatementSummary:
        digest, part = entry
        users, nodes = names[entry]
        return StatementSummary(
            counts=counts,
            share=counts[MICROSECONDS] / total_time if total_time else 0.0,
            per_second=counts[COUNT] / window.seconds,
            users=users,
            nodes=nodes,
            digest=digest,
            text=window.texts.get(digest),
            user=part if query.by == "user" and digest else None,
            node=part if query.by == "node" and digest else None,
        )

    return StatementSummaries(
        tuple(summary(entry, sums[entry]) for entry in ordered), summary(_OTHERS, others), len(sums)
    )


def _entry_of(key: StatementKey, query: StatementQuery) -> Entry:
    if not key.digest:
        return _OTHERS
    if query.by is None:
        return key.digest, ""
    return key.digest, key.user if query.by == "user" else key.node


def _largest_names(
    rows: Iterable[tuple[StatementKey, StatementCounts]], query: StatementQuery, entries: Set[Entry]
) -> Mapping[Entry, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the users and the nodes with the most time, for these entries."""
    users: dict[Entry, dict[str, float]] = {entry: {} for entry in entries}
    nodes: dict[Entry, dict[str, float]] = {entry: {} for entry in entries}
    for key, counts in rows:
        entry = _entry_of(key, query)
        if entry in entries:
            for of_entry, name in ((users[entry], key.user), (nodes[entry], key.node)):
                of_entry[name] = of_entry.get(name, 0.0) + counts[MICROSECONDS]
    return {entry: (_largest(users[entry]), _largest(nodes[entry])) for entry in entries}


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

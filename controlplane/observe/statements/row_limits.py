"""Keeps the rows with the most time, and sums the others. Pure functions."""

from __future__ import annotations

import heapq

from controlplane.model.statements import MICROSECONDS, Rows, StatementCounts, StatementKey, add_to

_MAX_OTHER_ROWS = 200  # rows without a statement, one per node and Envoy


def merge_rows(one: Rows, other: Rows) -> dict[StatementKey, StatementCounts]:
    """Return the sums of both. Rows that only one of them has are shared."""
    merged = dict(one)
    for key, counts in other.items():
        add_to(merged, key, counts)
    return merged


def keep_largest(rows: Rows, max_rows: int) -> dict[StatementKey, StatementCounts]:
    """Return at most `max_rows` rows with a digest, those with the most time.

    The others are summed in rows without a digest and a user, one per node and Envoy, or if these are too
    many, in one row.
    """
    with_digest = [key for key in rows if key.digest]
    kept = heapq.nlargest(max_rows, with_digest, key=lambda key: rows[key][MICROSECONDS])
    result = {key: rows[key] for key in kept}
    others: dict[StatementKey, StatementCounts] = {}
    for key in rows.keys() - result.keys():
        add_to(others, StatementKey("", "", key.node, key.envoy), rows[key])
    if len(others) > _MAX_OTHER_ROWS:
        total: dict[StatementKey, StatementCounts] = {}
        for counts in others.values():
            add_to(total, StatementKey("", "", "", ""), counts)
        others = total
    return result | others

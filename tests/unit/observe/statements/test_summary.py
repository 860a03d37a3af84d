"""Summaries of statements: sums, filters, order, and quantiles of latency histograms."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.model.statements import COUNT, MICROSECONDS, StatementQuery, StatementWindow
from controlplane.observe.statements.summary import latency_quantile, summarize
from tests.support.controlplane.statement_reports import LATENCY_BUCKETS, digest_of, report, row, text_of

A, B = "10.0.0.1:4000", "10.0.0.2:4000"


def histogram(**counts: int) -> list[int]:
    """Return the counts per bucket; `b3=1` is one execution in the bucket with index 3."""
    return [counts.get(f"b{index}", 0) for index in range(LATENCY_BUCKETS)]


@pytest.mark.parametrize(
    ("q", "latency", "max_seconds", "expected"),
    [
        (0.5, histogram(), 0.0, None),
        (0.5, histogram(b0=2), 1.0, 0.00025),  # halfway between 0 and 0.5 ms
        (1.0, histogram(b0=2), 1.0, 0.0005),
        (0.5, histogram(b3=2), 1.0, 0.00375),  # halfway between 2.5 ms and 5 ms
        (0.95, histogram(b3=100), 0.003, 0.003),  # never more than the highest latency
        (0.5, histogram(b1=1, b12=1), 9.0, 0.001),
        (0.75, histogram(b1=1, b12=1), 9.0, 6.25),  # halfway between 2.5 s and 10 s
        (0.5, histogram(b13=2), 30.0, 20.0),  # halfway between 10 s and the highest latency
        (1.0, histogram(b0=1, b13=1), 30.0, 30.0),
        (0.99, histogram(b13=1), 0.0, 10.0),  # a wrong highest latency
    ],
)
def test_quantile_is_interpolated(
    q: float, latency: list[int], max_seconds: float, expected: float | None
) -> None:
    value = latency_quantile(q, latency, max_seconds)
    assert value == (None if expected is None else pytest.approx(expected))


def window(*rows: dict[str, Any], seconds: float = 10.0) -> StatementWindow:
    """Return a window of two slots; the second one repeats the first row."""
    first = report(*rows)
    return StatementWindow(0.0, seconds, (first.rows, report(rows[0]).rows), first.texts)


ROWS = (
    row(1, "app", A, milliseconds=2, bucket=2, errors=1),
    row(1, "root", B, milliseconds=10, bucket=4, rows=100),
    row(2, "app", A, milliseconds=5, bucket=3, count=7, latency=histogram(b3=7)),
    row(0, "", B, milliseconds=1),
)


def test_executions_of_all_users_and_nodes_are_summed() -> None:
    result = summarize(window(*ROWS), StatementQuery())
    first, second = result.statements
    assert (first.digest, first.text, first.users, first.nodes) == (
        digest_of(1),
        text_of(1),
        ("root", "app"),
        (B, A),
    )
    assert (first.counts[COUNT], first.counts[MICROSECONDS], first.per_second) == (3, 14_000, 0.3)
    assert (second.counts[COUNT], second.share) == (7, 5 / 20)
    assert (result.others.counts[COUNT], result.others.share, result.others.digest) == (1, 1 / 20, "")
    assert (first.user, first.node, result.total) == (None, None, 2)
    assert sum(part.share for part in (*result.statements, result.others)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("sort", "numbers"),
    [
        ("time", [1, 2]),
        ("count", [2, 1]),
        ("errors", [1, 2]),
        ("rows", [1, 2]),
        ("p95", [1, 2]),
        ("max", [1, 2]),
    ],
)
def test_order(sort: Any, numbers: list[int]) -> None:
    result = summarize(window(*ROWS), StatementQuery(sort=sort))
    assert [summary.digest for summary in result.statements] == [digest_of(number) for number in numbers]


@pytest.mark.parametrize(
    ("query", "counts", "others"),
    [
        (StatementQuery(user="root"), {1: 1}, 0),
        (StatementQuery(node=A), {1: 2, 2: 7}, 0),
        (StatementQuery(node=B), {1: 1}, 1),
        (StatementQuery(envoy="envoy-1"), {1: 3, 2: 7}, 1),
        (StatementQuery(envoy="envoy-2"), {}, 0),
        (StatementQuery(digest="02"), {2: 7}, 0),
        (StatementQuery(digest=digest_of(1)), {1: 3}, 0),
    ],
    ids=repr,
)
def test_filters(query: StatementQuery, counts: dict[int, int], others: int) -> None:
    result = summarize(window(*ROWS), query)
    by_digest = {summary.digest: summary.counts[COUNT] for summary in result.statements}
    assert by_digest == {digest_of(number): count for number, count in counts.items()}
    assert result.others.counts[COUNT] == others


def test_split_by_user_and_by_node() -> None:
    by_user = summarize(window(*ROWS), StatementQuery(by="user"))
    assert [(s.digest[:2], s.user, s.node, s.counts[COUNT]) for s in by_user.statements] == [
        ("01", "root", None, 1),
        ("02", "app", None, 7),
        ("01", "app", None, 2),
    ]
    by_node = summarize(window(*ROWS), StatementQuery(by="node", limit=1))
    assert [(s.digest[:2], s.node) for s in by_node.statements] == [("01", B)]
    assert by_node.total == 3


def test_without_statistics() -> None:
    result = summarize(StatementWindow(0.0, 1.0, ({},), {}), StatementQuery())
    assert (result.statements, result.others.counts[COUNT], result.others.share) == ((), 0, 0.0)

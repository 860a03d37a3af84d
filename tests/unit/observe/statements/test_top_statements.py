"""Which digests Prometheus sees, and their counters."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from controlplane.config.statements import StatementSettings
from controlplane.model.statements import COUNT
from controlplane.observe.statements.collector import StatementCollector
from controlplane.observe.statements.top_statements import TopStatements
from tests.support.controlplane.statement_reports import digest_of, report, row


def counts(top: TopStatements) -> Mapping[str, float]:
    return {digest: total[COUNT] for digest, total in top.totals.items()}


def test_counters_start_at_zero_and_grow_while_shown() -> None:
    top = TopStatements()
    top.update([digest_of(1), digest_of(2)], 1)
    assert counts(top) == {digest_of(1): 0}
    top.add(report(row(1, "a"), row(1, "b"), row(2)).rows)
    assert counts(top) == {digest_of(1): 2}


@pytest.mark.parametrize(
    ("ranking", "shown"),
    [
        ("abcdef", "ab"),
        ("bacdef", "ab"),
        ("cdabef", "ab"),  # still among the first four
        ("cdaefb", "ac"),
        ("cdefab", "cd"),
        ("a", "a"),
        ("", ""),
    ],
)
def test_digest_stays_while_it_is_in_twice_the_limit(ranking: str, shown: str) -> None:
    top = TopStatements()
    top.update("ab", 2)
    top.update(ranking, 2)
    assert "".join(sorted(top.totals)) == shown


def test_lower_limit() -> None:
    top = TopStatements()
    top.update("abcd", 4)
    top.update("abcd", 2)
    assert "".join(top.totals) == "ab"
    top.update("abcd", 0)
    assert not top.totals


def test_collector_ranks_when_a_slot_ends() -> None:
    now = 1_800_000_000.0
    collector = StatementCollector(StatementSettings(digests="on", metrics_digests=1), lambda: now)
    collector.put(report(row(1), row(2, milliseconds=9)))
    assert not collector.top_totals()
    now += 10
    collector.put(report(row(2), sequence=2))
    collector.put(report(row(2), sequence=2))
    assert {digest: total[COUNT] for digest, total in collector.top_totals().items()} == {digest_of(2): 1}
    now += 400
    collector.put(report(row(1), sequence=3))
    now += 10
    assert any(collector.window(60).slots)
    collector.put(report(row(2), sequence=4))
    assert collector.top_totals().keys() == {digest_of(1)}  # although `window` has closed the slot
    collector.configure(StatementSettings())
    assert not collector.top_totals()
    assert not any(collector.window(60).slots)
    collector.put(report(row(2), sequence=5))
    assert not any(collector.window(60).slots)

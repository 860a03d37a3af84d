"""What the store of statement statistics keeps, for how long, and its bounds."""

from __future__ import annotations

import tracemalloc

import pytest

from controlplane.model.statements import COUNT, MICROSECONDS
from controlplane.observe.envoy_reports.statement_reports import parse_report
from controlplane.observe.statements import row_limits, store
from controlplane.observe.statements.store import StatementStore
from tests.support.controlplane.statement_reports import (
    OTHER_INSTANCE,
    digest_of,
    executions,
    report,
    report_message,
    row,
    text_of,
)

START = 1_800_000_000.0  # a multiple of 60


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_report_counts_once(clock: Clock) -> None:
    statements = StatementStore(clock)
    assert statements.add(report(row(1), row(2, "root")))
    assert not statements.add(report(row(1), row(2, "root")))
    assert statements.add(report(row(1), sequence=2))
    assert not statements.add(report(row(1), sequence=1))
    assert statements.add(report(row(1), sequence=1, instance=OTHER_INSTANCE))
    window = statements.window(60)
    assert executions(window) == {digest_of(1): 3, digest_of(2): 1}
    assert window.texts == {digest_of(1): text_of(1), digest_of(2): text_of(2)}


def test_old_statistics_are_merged_and_then_deleted(clock: Clock) -> None:
    statements = StatementStore(clock)
    for sequence in range(1, 721):
        assert statements.add(report(row(1), sequence=sequence))
        clock.now += 10
    clock.now -= 10
    assert executions(statements.window(60)) == {digest_of(1): 7}  # and the slot that has just begun
    assert executions(statements.window(3600))[digest_of(1)] == pytest.approx(360, abs=6)
    assert len(statements.window(3600).slots) <= 1 + 31 + 56
    clock.now += 7200
    assert executions(statements.window(3600)) == {}


def test_window_says_which_time_it_covers(clock: Clock) -> None:
    statements = StatementStore(clock)
    clock.now += 4
    assert (statements.window(60).since, statements.window(60).seconds) == (START, 4.0)
    statements.add(report(row(1)))
    clock.now += 95
    statements.add(report(row(1), sequence=2))
    window = statements.window(92)
    assert (window.since, window.seconds) == (START, 99.0)  # with all of the slot that began at START
    assert executions(window) == {digest_of(1): 2}
    assert executions(statements.window(60)) == {digest_of(1): 1}
    statements.clear()
    assert (statements.window(60).since, executions(statements.window(60))) == (clock.now, {})


def test_snapshot_does_not_change(clock: Clock) -> None:
    statements = StatementStore(clock)
    statements.add(report(row(1)))
    window = statements.window(60)
    statements.add(report(row(1), sequence=2))
    assert executions(window) == {digest_of(1): 1}


def test_rows_are_bounded_and_the_others_are_summed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MAX_ROWS_PER_SLOT", 3)
    monkeypatch.setattr(store, "_MAX_ROWS_PER_OLD_SLOT", 2)
    statements = StatementStore(clock)
    statements.add(report(*(row(number, milliseconds=number) for number in range(1, 11))))
    assert executions(statements.window(60)) == {"": 7, digest_of(8): 1, digest_of(9): 1, digest_of(10): 1}
    clock.now += 400
    assert executions(statements.window(600)) == {"": 8, digest_of(9): 1, digest_of(10): 1}
    times = [counts[MICROSECONDS] for rows in statements.window(600).slots for counts in rows.values()]
    assert sum(times) == sum(range(1, 11)) * 1000


def test_others_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_limits, "_MAX_OTHER_ROWS", 2)
    two = report(row(0, node="a"), row(0, node="b")).rows
    three = report(row(0, node="a"), row(0, node="b"), row(0, node="c")).rows
    assert [key.node for key in row_limits.keep_largest(two, 9)] in (["a", "b"], ["b", "a"])
    assert [(key.node, counts[COUNT]) for key, counts in row_limits.keep_largest(three, 9).items()] == [
        ("", 3)
    ]


def test_texts_are_bounded_and_the_latest_stay(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MAX_TEXTS", 4)
    statements = StatementStore(clock)
    for sequence in range(1, 10):
        statements.add(report(row(sequence), sequence=sequence))
    texts = statements.window(60).texts
    assert len(texts) <= 4
    assert digest_of(9) in texts


def test_memory_of_a_row(clock: Clock) -> None:
    """The bound of the whole store depends on this number."""
    statements = StatementStore(clock)
    messages = [
        report_message(*(row(1, f"user{n}", f"node{i}") for n in range(500)), sequence=i) for i in range(1, 4)
    ]
    tracemalloc.start()
    for message in messages:
        statements.add(parse_report(message, "envoy-1"))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 1500 < 700


def test_known_processes_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MAX_PROCESSES", 2)
    statements = StatementStore(clock)
    for number in range(5):
        assert statements.add(report(row(1), instance=f"{number:016x}"))
    assert not statements.add(report(row(1), instance=f"{4:016x}"))


def test_ranking_is_of_the_last_minutes(clock: Clock) -> None:
    statements = StatementStore(clock)
    statements.add(report(row(1, milliseconds=900), row(2), row(3, milliseconds=5)))
    assert statements.ranking() == []  # of closed slots only
    clock.now += 10
    assert statements.advance()
    assert statements.ranking() == [digest_of(1), digest_of(3), digest_of(2)]
    clock.now += 400
    statements.advance()
    assert statements.ranking() == []

"""Moves are counted on over restarts of Envoys and of their streams."""

from __future__ import annotations

from controlplane.model.traffic import ModuleReport, Traffic
from controlplane.observe.migration_counters import MigrationCounters

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
OK, SLOW = ("moved", "ok"), ("stayed", "slow")


def report(
    *,
    is_first: bool = False,
    instance: str = "",
    envoy: str = "one",
    node: str = A,
    ok: int = 0,
    slow: int = 0,
) -> ModuleReport:
    moves = {key: count for key, count in ((OK, ok), (SLOW, slow)) if count}
    return ModuleReport(
        envoy,
        1.0,
        instance=instance,
        nodes={node: Traffic(migrations=moves)},
        is_first=is_first,
    )


def test_what_was_counted_before_it_was_heard_of_does_not_count() -> None:
    counts = MigrationCounters()
    counts.add(report(is_first=True, ok=40))
    assert not any(counts.totals[A].values())
    counts.add(report(ok=42, slow=7))
    assert counts.totals[A] == {OK: 2, SLOW: 7}


def test_what_is_heard_of_after_the_first_flush_is_new() -> None:
    counts = MigrationCounters()
    counts.add(report())
    counts.add(report(ok=3))
    counts.add(report(envoy="two", ok=5, slow=1))
    assert counts.totals[A] == {OK: 8, SLOW: 1}


def test_an_envoy_that_begins_anew_is_counted_on() -> None:
    counts = MigrationCounters()
    counts.add(report(ok=10))
    counts.add(report(is_first=True))
    counts.add(report(ok=4))
    counts.add(report(ok=6))
    assert counts.totals[A] == {OK: 16}


def test_of_a_process_that_is_new_to_us_only_what_comes_after_its_first_flush_counts() -> None:
    """It may have run for long before it reached us, under the id of one that we knew."""
    counts = MigrationCounters()
    counts.add(report(instance="a", ok=10))
    counts.add(report(is_first=True, instance="b", ok=400))
    assert counts.totals[A] == {OK: 10}
    counts.add(report(instance="b", ok=401, slow=1))
    assert counts.totals[A] == {OK: 11, SLOW: 1}


def test_a_stream_that_broke_is_counted_on() -> None:
    counts = MigrationCounters()
    counts.add(report(instance="a", ok=10))
    counts.add(report(is_first=True, instance="a", ok=13))
    assert counts.totals[A] == {OK: 13}


def test_what_was_counted_of_a_node_before_it_was_forgotten_is_not_new_when_it_comes_back() -> None:
    counts = MigrationCounters()
    counts.add(report(ok=400))
    counts.retain_nodes({})
    counts.retain_nodes({A: None})
    counts.add(report(ok=401, slow=1))
    assert not any(counts.totals[A].values())
    counts.add(report(ok=403, slow=1))
    assert counts.totals[A] == {OK: 2}


def test_nodes_are_forgotten_and_sums_outlive_their_envoys() -> None:
    counts = MigrationCounters()
    counts.add(report(ok=1))
    counts.add(report(node=B, ok=2))
    counts.forget_envoy("one")
    counts.forget_envoy("never heard of")
    counts.retain_nodes({A: None})
    assert counts.totals == {A: {OK: 1}}

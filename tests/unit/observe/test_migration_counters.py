"""Migration counters continue across restarts of Envoys and of their streams."""

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
    migrations = {key: count for key, count in ((OK, ok), (SLOW, slow)) if count}
    return ModuleReport(
        envoy,
        1.0,
        instance=instance,
        nodes={node: Traffic(migrations=migrations)},
        is_first=is_first,
    )


def test_first_report_is_the_baseline() -> None:
    counters = MigrationCounters()
    counters.add(report(is_first=True, ok=40))
    assert not any(counters.totals[A].values())
    counters.add(report(ok=42, slow=7))
    assert counters.totals[A] == {OK: 2, SLOW: 7}


def test_counter_missing_in_first_flush_starts_at_zero() -> None:
    counters = MigrationCounters()
    counters.add(report())
    counters.add(report(ok=3))
    counters.add(report(envoy="two", ok=5, slow=1))
    assert counters.totals[A] == {OK: 8, SLOW: 1}


def test_counting_continues_after_envoy_restart() -> None:
    counters = MigrationCounters()
    counters.add(report(ok=10))
    counters.add(report(is_first=True))
    counters.add(report(ok=4))
    counters.add(report(ok=6))
    assert counters.totals[A] == {OK: 16}


def test_first_flush_of_another_process_is_a_new_baseline() -> None:
    """The process may have run for long, under the id of a known Envoy, before it connected to us."""
    counters = MigrationCounters()
    counters.add(report(instance="a", ok=10))
    counters.add(report(is_first=True, instance="b", ok=400))
    assert counters.totals[A] == {OK: 10}
    counters.add(report(instance="b", ok=401, slow=1))
    assert counters.totals[A] == {OK: 11, SLOW: 1}


def test_counting_continues_after_stream_restart() -> None:
    counters = MigrationCounters()
    counters.add(report(instance="a", ok=10))
    counters.add(report(is_first=True, instance="a", ok=13))
    assert counters.totals[A] == {OK: 13}


def test_returning_node_has_a_new_baseline() -> None:
    counters = MigrationCounters()
    counters.add(report(ok=400))
    counters.retain_nodes({})
    counters.retain_nodes({A: None})
    counters.add(report(ok=401, slow=1))
    assert not any(counters.totals[A].values())
    counters.add(report(ok=403, slow=1))
    assert counters.totals[A] == {OK: 2}


def test_sums_survive_their_envoy_but_not_their_node() -> None:
    counters = MigrationCounters()
    counters.add(report(ok=1))
    counters.add(report(node=B, ok=2))
    counters.forget_envoy("one")
    counters.forget_envoy("unknown")
    counters.retain_nodes({A: None})
    assert counters.totals == {A: {OK: 1}}

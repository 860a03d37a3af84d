"""Migration counters: they continue after restarts of Envoys and of their streams."""

from __future__ import annotations

from controlplane.model.traffic import ModuleReport
from controlplane.observe.migration_counters import MigrationCounters

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
OK, SLOW = ("moved", "ok"), ("failed", "slow")


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
        migrations={node: migrations} if migrations else {},
        is_first=is_first,
    )


def test_first_report_is_the_baseline() -> None:
    counters = MigrationCounters()
    counters.add_report(report(is_first=True, ok=40))
    assert not any(counters.totals[A].values())
    counters.add_report(report(ok=42, slow=7))
    assert counters.totals[A] == {OK: 2, SLOW: 7}


def test_counter_missing_in_first_flush_starts_at_zero() -> None:
    counters = MigrationCounters()
    for envoy in ("one", "two"):
        counters.add_report(report(is_first=True, envoy=envoy))
    counters.add_report(report(ok=3))
    counters.add_report(report(envoy="two", ok=5, slow=1))
    assert counters.totals[A] == {OK: 8, SLOW: 1}


def test_counting_continues_after_envoy_restart() -> None:
    counters = MigrationCounters()
    counters.add_report(report(is_first=True))
    counters.add_report(report(ok=10))
    counters.add_report(report(is_first=True))
    counters.add_report(report(ok=4))
    counters.add_report(report(ok=6))
    assert counters.totals[A] == {OK: 16}


def test_first_flush_of_another_process_is_a_new_baseline() -> None:
    """A new process with the id of a known Envoy may have counted for long before it connected to us."""
    counters = MigrationCounters()
    counters.add_report(report(is_first=True, instance="a"))
    counters.add_report(report(instance="a", ok=10))
    counters.add_report(report(is_first=True, instance="b", ok=400))
    assert counters.totals[A] == {OK: 10}
    counters.add_report(report(instance="b", ok=401, slow=1))
    assert counters.totals[A] == {OK: 11, SLOW: 1}


def test_counting_continues_after_stream_restart() -> None:
    counters = MigrationCounters()
    counters.add_report(report(is_first=True, instance="a"))
    counters.add_report(report(instance="a", ok=10))
    counters.add_report(report(is_first=True, instance="a", ok=13))
    assert counters.totals[A] == {OK: 13}


def test_returning_node_has_a_new_baseline() -> None:
    counters = MigrationCounters()
    counters.add_report(report(ok=400))
    counters.retain_nodes({})
    counters.retain_nodes({A: None})
    counters.add_report(report(ok=401, slow=1))
    assert not any(counters.totals[A].values())
    counters.add_report(report(ok=403, slow=1))
    assert counters.totals[A] == {OK: 2}


def test_totals_stay_after_an_envoy_is_forgotten_but_not_after_a_node_is_removed() -> None:
    counters = MigrationCounters()
    counters.add_report(report(is_first=True))
    counters.add_report(report(ok=1))
    counters.add_report(report(node=B, ok=2))
    counters.forget_envoy("one")
    counters.forget_envoy("unknown")
    counters.retain_nodes({A: None})
    assert counters.totals == {A: {OK: 1}}


def test_first_report_after_an_envoy_is_forgotten_is_a_new_baseline() -> None:
    """The stream of a forgotten Envoy may continue, so this report is not the first one of its stream."""
    counters = MigrationCounters()
    counters.add_report(report(is_first=True, instance="a"))
    counters.add_report(report(instance="a", ok=400))
    counters.forget_envoy("one")
    counters.add_report(report(instance="a", ok=401))
    assert counters.totals[A] == {OK: 400}
    counters.add_report(report(instance="a", ok=403, slow=1))
    assert counters.totals[A] == {OK: 402, SLOW: 1}

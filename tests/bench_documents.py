"""Made-up documents of the side-by-side benchmark, in the form of real ones; nobody measured them."""

from __future__ import annotations

from typing import Any

from bench.comparison import as_table
from bench.machine import Condition, Machine
from bench.side_by_side import document
from bench.targets import Target
from bench.workloads import Load, Stage, Workload

MACHINE = Machine("a CPU", 2, 1024, "Linux 6.1", "3.11.7", "1.40.0", "3.4.23")
QUIET = Condition("2026-01-01 00:00:00Z", 0.5, 0.02)
PEERS = {
    "direct": "MariaDB 10.1.2",
    "HAProxy": "2.0.1",
    "HAProxy again": "2.0.1",
    "Envoy": "1.40.0",
    "Tidevoy": "0.1.0",
}
# What each costs in proportion to HAProxy, round by round. The A/A pair differs by up to 5 %.
_RATIOS = {
    "HAProxy": (1.0, 1.0, 1.0),
    "HAProxy again": (0.95, 1.0, 1.04),
    "Envoy": (1.28, 1.3, 1.33),
    "Tidevoy": (0.96, 0.97, 1.01),
}
_HAPROXY = {"qps": 5_000.0, "p95_ms": 2.0, "cpu_us": 50.0, "resident_mib": 20.0, "connection_kb": 4.0}


def made_up(*tables: dict[str, Any]) -> dict[str, Any]:
    """A document with these tables."""
    return document(MACHINE, tables)


def table(
    workload: str = "point select, text",
    *,
    threads: int = 4,
    workers: int = 1,
    targets: tuple[Target, ...] = (),
) -> dict[str, Any]:
    """Envoy has 30 % more of everything than HAProxy; Tidevoy 3 % less, which is within the A/A spread."""
    measured = {
        name: {figure: [value * ratio for ratio in ratios] for figure, value in _HAPROXY.items()}
        for name, ratios in _RATIOS.items()
    }
    return as_table(
        Workload(workload, "How it was done.", threads, _no_load, Stage(workers), targets),
        {"direct": {"qps": [9_000.0] * 3, "p95_ms": [1.0] * 3}, **measured},
        PEERS,
        rounds=3,
        seconds=6.0,
        condition=QUIET.as_json(),
        reference="HAProxy",
        again="HAProxy again",
    )


def _no_load(_: object) -> Load:
    raise NotImplementedError("nothing is measured in these tests")

"""How probe results update a node's health, and when the next probe is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.observe.health.health_checker import CheckKind, health_after_probe, next_probe_at
from controlplane.observe.health.probes import ProbeResult

PASS = ProbeResult(CheckStatus.PASS, "answers", connections=7, version="8.0.11-TiDB-v8.5.3")
FAIL = ProbeResult(CheckStatus.FAIL, "refuses connections")
STOPPING = ProbeResult(CheckStatus.STOPPING, "reports that it is shutting down")


def test_consecutive_counts_equal_results_and_restarts_at_one() -> None:
    health = Health()
    counts = []
    for at, result in enumerate([PASS, PASS, FAIL, STOPPING, STOPPING, STOPPING, PASS]):
        health = health_after_probe(health, CheckKind.STATUS, result, float(at))
        assert health.status is not None
        assert (health.status.status, health.status.reason) == (result.status, result.reason)
        assert health.status.at == at
        counts.append(health.status.consecutive)
    assert counts == [1, 2, 1, 1, 2, 3, 1]


def test_status_and_sql_checks_are_independent() -> None:
    health = health_after_probe(Health(), CheckKind.STATUS, PASS, 1.0)
    health = health_after_probe(health, CheckKind.SQL, FAIL, 2.0)
    assert health.status == CheckResult(CheckStatus.PASS, "answers", 1, 1.0)
    assert health.sql == CheckResult(CheckStatus.FAIL, "refuses connections", 1, 2.0)


def test_full_node_keeps_the_result_of_its_statement_check() -> None:
    full = ProbeResult(CheckStatus.FULL, "too many connections")
    health = health_after_probe(Health(), CheckKind.STATEMENT, full, 1.0)
    assert health.statement == CheckResult(CheckStatus.FULL, "too many connections", 1, 1.0)
    for result, consecutive in ((FAIL, 1), (full, 1), (FAIL, 2), (full, 2), (PASS, 1), (full, 1)):
        health = health_after_probe(health, CheckKind.STATEMENT, result, 2.0)
        assert health.statement is not None
        assert health.statement.consecutive == consecutive
    assert health.statement == CheckResult(CheckStatus.PASS, "answers", 1, 2.0)
    assert (health.status, health.sql, health.connections) == (None, None, None)


def test_connection_count_and_version_survive_failures() -> None:
    health = health_after_probe(Health(), CheckKind.STATUS, PASS, 1.0)
    health = health_after_probe(health, CheckKind.STATUS, FAIL, 2.0)
    assert (health.connections, health.connections_at) == (7, 1.0)
    assert health.version == "8.0.11-TiDB-v8.5.3"


def test_greeting_sets_version_but_no_connections() -> None:
    health = health_after_probe(
        Health(), CheckKind.SQL, ProbeResult(CheckStatus.PASS, "greets", version="8.0.11-TiDB-v9"), 1.0
    )
    assert health.version == "8.0.11-TiDB-v9"
    assert health.connections is None
    health = health_after_probe(health, CheckKind.STATUS, PASS, 2.0)
    health = health_after_probe(
        health, CheckKind.SQL, ProbeResult(CheckStatus.PASS, "greets", version="5.7.25"), 3.0
    )
    assert health.version == "8.0.11-TiDB-v8.5.3"  # the version from the status port has priority


@pytest.mark.parametrize(
    ("due_at", "interval", "now", "next_at"),
    [
        (10.0, 1.0, 10.2, 11.0),
        (10.0, 1.0, 11.0, 12.0),  # late by one interval: the probe of 11.0 is skipped
        (10.0, 1.0, 13.7, 14.0),  # a stall of three intervals is followed by one probe
        (10.0, 0.25, 10.3, 10.5),
    ],
)
def test_next_probe_keeps_its_offset_in_the_interval(
    due_at: float, interval: float, now: float, next_at: float
) -> None:
    assert next_probe_at(due_at, interval, now) == pytest.approx(next_at)


@pytest.mark.parametrize(
    ("now", "next_at"), [(10.2, 11.0), (11.001, 11.0), (11.2, 11.0), (11.3, 12.0), (13.7, 14.0), (14.1, 14.0)]
)
def test_slightly_late_probe_is_not_skipped(now: float, next_at: float) -> None:
    assert next_probe_at(10.0, 1.0, now, tolerance=0.25) == pytest.approx(next_at)


@given(
    due_at=st.floats(0, 1e6),
    interval=st.floats(0.05, 300),
    elapsed=st.floats(0, 1e4),
)
def test_next_probe_is_at_most_one_interval_away(due_at: float, interval: float, elapsed: float) -> None:
    now = due_at + elapsed
    next_at = next_probe_at(due_at, interval, now)
    assert now - 1e-6 <= next_at <= now + interval + 1e-6
    intervals = (next_at - due_at) / interval
    assert math.isclose(intervals, round(intervals), abs_tol=1e-4)

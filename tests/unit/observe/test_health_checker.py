"""How findings become what is known of a node, and when the next probe is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.observe.health.health_checker import CheckKind, next_probe_at, with_result
from controlplane.observe.health.probes import ProbeResult

PASS = ProbeResult(CheckStatus.PASS, "answers", connections=7, version="8.0.11-TiDB-v8.5.3")
FAIL = ProbeResult(CheckStatus.FAIL, "refuses connections")
STOPPING = ProbeResult(CheckStatus.STOPPING, "says that it is shutting down")


def test_a_streak_counts_equal_outcomes_and_starts_again_at_one() -> None:
    health = Health()
    streaks = []
    for at, finding in enumerate([PASS, PASS, FAIL, STOPPING, STOPPING, STOPPING, PASS]):
        health = with_result(health, CheckKind.STATUS, finding, float(at))
        assert health.status is not None
        assert (health.status.status, health.status.reason) == (finding.status, finding.reason)
        assert health.status.at == at
        streaks.append(health.status.consecutive)
    assert streaks == [1, 2, 1, 1, 2, 3, 1]


def test_the_two_checks_do_not_touch_each_other() -> None:
    health = with_result(Health(), CheckKind.STATUS, PASS, 1.0)
    health = with_result(health, CheckKind.SQL, FAIL, 2.0)
    assert health.status == CheckResult(CheckStatus.PASS, "answers", 1, 1.0)
    assert health.sql == CheckResult(CheckStatus.FAIL, "refuses connections", 1, 2.0)


def test_the_count_of_connections_and_the_version_outlive_failures() -> None:
    health = with_result(Health(), CheckKind.STATUS, PASS, 1.0)
    health = with_result(health, CheckKind.STATUS, FAIL, 2.0)
    assert (health.connections, health.connections_at) == (7, 1.0)
    assert health.version == "8.0.11-TiDB-v8.5.3"


def test_a_greeting_tells_the_version_but_no_connections() -> None:
    health = with_result(
        Health(), CheckKind.SQL, ProbeResult(CheckStatus.PASS, "greets", version="8.0.11-TiDB-v9"), 1.0
    )
    assert health.version == "8.0.11-TiDB-v9"
    assert health.connections is None
    health = with_result(health, CheckKind.STATUS, PASS, 2.0)
    health = with_result(
        health, CheckKind.SQL, ProbeResult(CheckStatus.PASS, "greets", version="5.7.25"), 3.0
    )
    assert health.version == "8.0.11-TiDB-v8.5.3"  # the status port's word counts more


@pytest.mark.parametrize(
    ("start", "interval", "now", "due"),
    [
        (10.0, 1.0, 10.2, 11.0),
        (10.0, 1.0, 11.0, 12.0),  # exactly late: not at once, that would be two probes in a row
        (10.0, 1.0, 13.7, 14.0),  # a stall of three intervals is followed by one probe
        (10.0, 0.25, 10.3, 10.5),
    ],
)
def test_the_next_probe_keeps_its_place_in_the_interval(
    start: float, interval: float, now: float, due: float
) -> None:
    assert next_probe_at(start, interval, now) == pytest.approx(due)


@pytest.mark.parametrize(
    ("now", "due"), [(10.2, 11.0), (11.001, 11.0), (11.2, 11.0), (11.3, 12.0), (13.7, 14.0), (14.1, 14.0)]
)
def test_a_probe_that_is_a_little_late_is_not_skipped(now: float, due: float) -> None:
    assert next_probe_at(10.0, 1.0, now, tolerance=0.25) == pytest.approx(due)


@given(
    start=st.floats(0, 1e6),
    interval=st.floats(0.05, 300),
    passed=st.floats(0, 1e4),
)
def test_the_next_probe_is_at_most_one_interval_away(start: float, interval: float, passed: float) -> None:
    now = start + passed
    due = next_probe_at(start, interval, now)
    assert now - 1e-6 <= due <= now + interval + 1e-6
    steps = (due - start) / interval
    assert math.isclose(steps, round(steps), abs_tol=1e-4)

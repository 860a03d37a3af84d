"""What is shown of slow changes, and how the stages of a control plane's changes are recorded."""

from __future__ import annotations

import pytest

from bench.control_plane.change_stages import Change, slowest
from bench.control_plane.tracing import Event


def change(number: int, sent: float, acked: float) -> Change:
    return Change(
        number,
        sent=sent,
        answered=acked + 0.001,
        passed=acked - 0.001,
        acked=acked,
        waits={"control plane": 0.002, "Envoy": 0.0},
    )


def test_the_slowest_change_is_told_with_what_happened_meanwhile() -> None:
    trace = [
        Event("intent stored", 9.999),
        Event("request received", 10.001),
        Event("garbage of generation 2 collected", 10.1, 0.09),
        Event("intent stored", 10.11),
        Event("intent stored", 20.005),
    ]
    lines = list(slowest([change(1, 20.0, 20.01), change(0, 10.0, 10.12)], trace, 1))
    assert lines == [
        "change 0 took 120.0 ms: request received 1.0,"
        " garbage of generation 2 collected 100.0 (took 90.0), intent stored 110.0,"
        " read from the control plane 119.0, ACK 120.0, answered 121.0;"
        " waits for a CPU: control plane 2.0, Envoy 0.0"
    ]


def test_what_takes_until_after_the_change_is_told_when_it_began_before() -> None:
    trace = [Event("garbage of generation 2 collected", 10.2, 0.15), Event("plan saved", 10.2)]
    (line,) = slowest([change(0, 10.0, 10.12)], trace, 1)
    assert "garbage of generation 2 collected 200.0 (took 150.0)" in line
    assert "plan saved" not in line


def test_waiting_for_a_cpu_is_no_work() -> None:
    assert change(0, 10.0, 10.12).worked == pytest.approx(0.118)
    assert Change(0, 1.0, 1.01, 1.01, 1.01, {"Envoy": 0.02}).worked == 0

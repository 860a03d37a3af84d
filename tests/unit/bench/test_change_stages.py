"""Description of slow changes, and the recording of their stages."""

from __future__ import annotations

import pytest

from bench.control_plane.change_stages import MeasuredChange, describe_slowest
from bench.control_plane.tracing import TraceEvent


def change(number: int, sent: float, acked: float) -> MeasuredChange:
    return MeasuredChange(
        number,
        sent_at=sent,
        answered_at=acked + 0.001,
        relayed_at=acked - 0.001,
        acked_at=acked,
        cpu_wait_seconds={"control plane": 0.002, "Envoy": 0.0},
    )


def test_slowest_change_lists_its_events() -> None:
    trace = [
        TraceEvent("intent stored", 9.999),
        TraceEvent("request received", 10.001),
        TraceEvent("garbage of generation 2 collected", 10.1, 0.09),
        TraceEvent("intent stored", 10.11),
        TraceEvent("intent stored", 20.005),
    ]
    lines = list(describe_slowest([change(1, 20.0, 20.01), change(0, 10.0, 10.12)], trace, 1))
    assert lines == [
        "change 0 took 120.0 ms: request received 1.0,"
        " garbage of generation 2 collected 100.0 (took 90.0), intent stored 110.0,"
        " read from the control plane 119.0, ACK 120.0, answered 121.0;"
        " waits for a CPU: control plane 2.0, Envoy 0.0"
    ]


def test_overlapping_event_is_listed() -> None:
    trace = [TraceEvent("garbage of generation 2 collected", 10.2, 0.15), TraceEvent("plan saved", 10.2)]
    (line,) = describe_slowest([change(0, 10.0, 10.12)], trace, 1)
    assert "garbage of generation 2 collected 200.0 (took 150.0)" in line
    assert "plan saved" not in line


def test_cpu_waits_are_subtracted() -> None:
    assert change(0, 10.0, 10.12).seconds_without_cpu_waits == pytest.approx(0.118)
    assert MeasuredChange(0, 1.0, 1.01, 1.01, 1.01, {"Envoy": 0.02}).seconds_without_cpu_waits == 0

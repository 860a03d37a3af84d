"""Conversion of times of another machine's clock, also after that clock was set."""

from __future__ import annotations

import pytest

from controlplane.observe.clock_offset import ClockOffset


@pytest.mark.parametrize("jump", [-1200.0, -2.5, 600.0])
def test_messages_after_a_jump_of_the_peers_clock_are_recent(jump: float) -> None:
    clock, now, ahead = ClockOffset(is_ordered=True), 1_000_000.0, 30.0
    for second in range(100):
        now += 1.0
        if second == 50:
            ahead += jump
        clock.observe(now - 0.1 + ahead, now)
        assert clock.to_local(now - 0.1 + ahead) == pytest.approx(now)


def test_time_before_that_of_the_previous_message_stays_old_without_an_order() -> None:
    clock = ClockOffset()
    clock.observe(1_000.0, 1_000.0)
    clock.observe(990.0, 1_001.0)
    assert clock.to_local(990.0) == 990.0

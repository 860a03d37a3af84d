"""In which order live sessions are listed."""

from __future__ import annotations

from controlplane.engine.session_directory import merge_sessions
from tests.support.controlplane.session_module import session


def test_merged_sessions_begin_with_those_that_are_busy_longest() -> None:
    states = [("idle", 9.0), ("busy", 1.0), ("transaction", 2.0), ("busy", 5.0), ("idle", 3.0)]
    sessions = [
        session(number, number, state=state, seconds_in_state=seconds)
        for number, (state, seconds) in enumerate(states)
    ]
    order = [(s.state, s.seconds_in_state) for s in merge_sessions([*sessions, sessions[0]], 4)]
    assert order == [("busy", 5.0), ("busy", 1.0), ("transaction", 2.0), ("idle", 3.0)]

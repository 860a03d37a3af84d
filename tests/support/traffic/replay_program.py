"""The program that replays traffic, and how to replace it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.verification.replay_program import ReplayProgramMissing, find_replay_program


def require_replay_program() -> Path:
    """Return the program. Fails the test if it is not built."""
    try:
        return find_replay_program()
    except ReplayProgramMissing:
        pytest.fail("tidevoy-replay is not built; run: make filters/target/release/libtidevoy.so")

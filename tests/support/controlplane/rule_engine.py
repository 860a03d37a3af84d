"""The program that judges statements, and how to replace it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.config import rule_checks
from controlplane.programs import find_program


def require_rule_engine() -> Path:
    """Return the program. Fails the test if it is not built."""
    program = find_program(rule_checks.PROGRAM)
    if program is None:
        pytest.fail("tidevoy-rules is not built; run: make filters/target/release/libtidevoy.so")
    return program


def replace_rule_engine(monkeypatch: pytest.MonkeyPatch, program: Path | None) -> None:
    """Let the control plane find this program; None: no program."""
    monkeypatch.setattr(rule_checks, "find_program", lambda _name: program)

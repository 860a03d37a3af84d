"""When waiting for a drain is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.cli.waiting import outcome


def node(state: str, sessions: int | None, *, deadline_in: float | None = 60.0) -> dict[str, Any]:
    deadline = None if deadline_in is None else datetime.now(UTC) + timedelta(seconds=deadline_in)
    return {
        "address": "a:1",
        "state": state,
        "sessions": sessions,
        "reason": "healthy",
        "drain": deadline and {"deadline": deadline.isoformat()},
    }


@pytest.mark.parametrize(
    "seen",
    [
        node("draining", 3),
        node("draining", None),
        node("draining", 0),  # not every Envoy has confirmed the zero yet
        node("gone", 3),
        node("gone", 3, deadline_in=None),
    ],
)
def test_waits_on(seen: dict[str, Any]) -> None:
    assert outcome(seen) is None


@pytest.mark.parametrize("seen", [node("drained", 0), node("drained", None), node("gone", 0, deadline_in=-1)])
def test_done(seen: dict[str, Any]) -> None:
    assert outcome(seen) == ""


def test_the_deadline_came() -> None:
    assert "still has 3 sessions" in (outcome(node("draining", 3, deadline_in=-1)) or "")


def test_somebody_took_the_drain_back() -> None:
    assert "taken back" in (outcome(node("active", 3, deadline_in=None)) or "")

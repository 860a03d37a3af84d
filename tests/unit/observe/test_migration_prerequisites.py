"""What a node's own configuration lacks for its sessions to move."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.observe.health.migration_prerequisites import find_migration_blockers

CERT = {"session-token-signing-cert": "/tidb/session.crt"}
MOVE, TIME = "its sessions cannot move", "its sessions have no time to move"


def config(**changes: Any) -> bytes:
    return json.dumps(
        {"security": CERT, "graceful-wait-before-shutdown": 15, "port": 4000} | changes
    ).encode()


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        (config(), []),
        (config(security={}), [MOVE]),  # a release that knows no such certificate
        (config(security={"session-token-signing-cert": ""}), [MOVE]),
        (config(security=CERT | {"session-token-signing-key": ""}), [MOVE + ": it has no key"]),
        (config(security=CERT | {"session-token-signing-key": "/tidb/session.key"}), []),
        (
            config(security=dict.fromkeys((*CERT, "session-token-signing-key"), "")),
            [MOVE + ": it has no certificate and no key"],
        ),
        (config(**{"graceful-wait-before-shutdown": 0}), [TIME]),
        (config(**{"graceful-wait-before-shutdown": 2}), [TIME]),
        (config(**{"graceful-wait-before-shutdown": 3}), []),
        (config(**{"graceful-wait-before-shutdown": 0}, security={}), [MOVE, TIME]),
        (config(**{"graceful-wait-before-shutdown": "soon"}, security={}), [MOVE]),
        (b'{"security": {}}', [MOVE]),
    ],
)
def test_what_is_missing_is_told(told: bytes, missing: list[str]) -> None:
    found = find_migration_blockers(told, 1.0)
    assert found is not None
    assert len(found) == len(missing)
    assert all(text.startswith(begin) for text, begin in zip(found, missing, strict=True))


@pytest.mark.parametrize(
    ("interval", "told"), [(0.1, "to 1 s or more"), (1.5, "to 5 s or more"), (300.0, "to 30 s or more")]
)
def test_the_time_that_is_needed_is_that_of_the_checks(interval: float, told: str) -> None:
    found = find_migration_blockers(config(**{"graceful-wait-before-shutdown": 0}), interval)
    assert found is not None
    assert told in found[0]


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"404 page not found",
        b"[]",
        b"[" * 60_000,
        b"\xff",
        json.dumps({"connections": 3, "version": "8.0.11-TiDB-v8.5.3"}).encode(),
        b'{"graceful-wait-before-shutdown": 0}',
        config(security=None),
    ],
)
def test_what_is_no_configuration_says_nothing(told: bytes) -> None:
    assert find_migration_blockers(told, 1.0) is None

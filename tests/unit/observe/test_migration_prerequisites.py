"""Settings of a node that prevent its sessions from migrating."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.observe.health.migration_prerequisites import find_migration_blockers

CERT = {"session-token-signing-cert": "/tidb/session.crt"}
NO_MIGRATION, NO_TIME = "its sessions cannot migrate", "its sessions have no time to migrate"


def config(**changes: Any) -> bytes:
    return json.dumps(
        {"security": CERT, "graceful-wait-before-shutdown": 15, "port": 4000} | changes
    ).encode()


@pytest.mark.parametrize(
    ("body", "expected_prefixes"),
    [
        (config(), []),
        (config(security={}), [NO_MIGRATION]),  # a TiDB release without this setting
        (config(security={"session-token-signing-cert": ""}), [NO_MIGRATION]),
        (config(security=CERT | {"session-token-signing-key": ""}), [NO_MIGRATION + ": it has no key"]),
        (config(security=CERT | {"session-token-signing-key": "/tidb/session.key"}), []),
        (
            config(security=dict.fromkeys((*CERT, "session-token-signing-key"), "")),
            [NO_MIGRATION + ": it has no certificate and no key"],
        ),
        (config(**{"graceful-wait-before-shutdown": 0}), [NO_TIME]),
        (config(**{"graceful-wait-before-shutdown": 2}), [NO_TIME]),
        (config(**{"graceful-wait-before-shutdown": 3}), []),
        (config(**{"graceful-wait-before-shutdown": 0}, security={}), [NO_MIGRATION, NO_TIME]),
        (config(**{"graceful-wait-before-shutdown": "soon"}, security={}), [NO_MIGRATION]),
        (b'{"security": {}}', [NO_MIGRATION]),
    ],
)
def test_finds_missing_prerequisites(body: bytes, expected_prefixes: list[str]) -> None:
    blockers = find_migration_blockers(body, 1.0)
    assert blockers is not None
    assert len(blockers) == len(expected_prefixes)
    assert all(
        blocker.startswith(prefix) for blocker, prefix in zip(blockers, expected_prefixes, strict=True)
    )


@pytest.mark.parametrize(
    ("interval", "text"), [(0.1, "to 1 s or more"), (1.5, "to 5 s or more"), (300.0, "to 30 s or more")]
)
def test_required_wait_depends_on_the_check_interval(interval: float, text: str) -> None:
    blockers = find_migration_blockers(config(**{"graceful-wait-before-shutdown": 0}), interval)
    assert blockers is not None
    assert text in blockers[0]


@pytest.mark.parametrize(
    "body",
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
def test_other_documents_give_no_result(body: bytes) -> None:
    assert find_migration_blockers(body, 1.0) is None

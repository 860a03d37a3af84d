"""All sessions of a fleet leave one real server at the default pace, while their clients run statements.

`make soak` drains 3,000 sessions.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bench.load_client import LoadClient, LoadTarget
from controlplane.config.settings import Settings
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb import Tidb
from tests.support.soak import SOAK
from tests.support.tidb.node_operations import drain, start_drain, undrain
from tests.support.waiting import wait_until

SESSIONS = 3_000 if SOAK else 300
STATEMENTS_PER_SECOND = 500
LOAD_SECONDS = 90.0 if SOAK else 12.0
"""Longer than the drain."""


async def connections_of(node: Tidb) -> int:
    """Return TiDB's own number of sessions."""
    async with http_client(node.status_url) as client:
        return int((await client.get("/status")).raise_for_status().json()["connections"])


@pytest.mark.timeout(300)
async def test_drain_of_many_sessions_costs_no_statement(stack: LocalCluster, tmp_path: Path) -> None:
    node, *others = stack.tidb
    client = await LoadClient.create(tmp_path)
    for other in others:
        await drain(stack, other)
    target = LoadTarget(stack.sql_port)
    async with client.slices([target], connections=SESSIONS, statement="select {}", max_number=9) as load:

        async def has_all_sessions() -> bool:  # TiDB counts a session shortly after its login
            return await connections_of(node) == SESSIONS

        await wait_until(has_all_sessions)
        for other in others:
            await undrain(stack, other)

        async def is_empty() -> bool:
            return await connections_of(node) == 0

        async with asyncio.TaskGroup() as group:
            # This fails if any statement fails or gets a wrong answer.
            statements = group.create_task(load.run(0, LOAD_SECONDS, rate=STATEMENTS_PER_SECOND))
            started_at = time.monotonic()
            await start_drain(stack, node)
            await wait_until(is_empty, LOAD_SECONDS)
            seconds = time.monotonic() - started_at
            assert not statements.done()
        result = statements.result()
        remaining = [await connections_of(other) for other in others]
    pace = Settings().migration.max_per_second
    print(
        f"\n{SESSIONS} sessions left in {seconds:.1f} s; at {pace:.0f}/s they need {SESSIONS / pace:.1f} s;"
        f" {len(result.latencies)} statements, the slowest took {max(result.latencies):.0f} ms"
    )
    assert sum(remaining) == SESSIONS
    assert len(result.latencies) >= 0.9 * LOAD_SECONDS * STATEMENTS_PER_SECOND

"""Operations on nodes through the REST API, and waits for their effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pymysql

from bench.migration.rolling_restart import fetch_module_stats, parse_migration_counts
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from tests.support.tidb.sessions import connect_directly
from tests.support.waiting import wait_until

_TIMEOUT_SECONDS = 30.0


async def start_drain(stack: LocalCluster, node: Tidb) -> None:
    """Start draining a node, without waiting."""
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()


async def drain(stack: LocalCluster, node: Tidb, seconds: float = _TIMEOUT_SECONDS) -> None:
    """Drain a node and wait until no session is left."""
    await start_drain(stack, node)
    await wait_for_state(stack, node, "drained", seconds)


async def undrain(stack: LocalCluster, node: Tidb) -> None:
    """Return a node to service."""
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await wait_for_state(stack, node, "active")


async def wait_for_state(
    stack: LocalCluster, node: Tidb, state: str, seconds: float = _TIMEOUT_SECONDS
) -> None:
    """Wait until a node is in this state."""

    async def is_reached() -> bool:
        return (await stack.states()).get(node.address) == state

    await stack.wait_until(is_reached, f"{node.address} {state}", seconds)


async def migration_counts(stack: LocalCluster) -> dict[tuple[str, str, str], int]:
    """Return the number of finished migrations, by source node, result and reason."""
    page = await fetch_module_stats(stack.envoy)
    return {
        (node, result, reason): count for node, result, reason, count in parse_migration_counts(page) if count
    }


async def wait_for_migrations(stack: LocalCluster, node: Tidb, count: int) -> None:
    """Wait until this many sessions have migrated away from a node."""

    async def is_reached() -> bool:
        return (await migration_counts(stack)).get((node.address, "moved", "ok"), 0) >= count

    await stack.wait_until(is_reached, f"{count} migrations from {node.address}", _TIMEOUT_SECONDS)


async def wait_until_can_log_in(nodes: Sequence[Tidb], user: str, password: str = "", **options: Any) -> None:
    """Wait until a new user can log in at all nodes: each reloads its privileges independently."""
    await wait_until(lambda: all(can_log_in(node, user, password, **options) for node in nodes))


def can_log_in(node: Tidb, user: str, password: str = "", **options: Any) -> bool:
    """Return whether the user can log in at this node. `options` are those of `connect`."""
    try:
        connect_directly(node, user=user, password=password, **options).close()
    except pymysql.err.OperationalError:
        return False
    return True

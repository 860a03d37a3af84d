"""Operations on nodes through the REST API, and waiting for their effect."""

from __future__ import annotations

from collections.abc import Sequence

import pymysql

from bench.migration.rolling_restart import moves_told
from sandbox.local_cluster import Stack
from sandbox.tidb import Tidb
from tests.support.tidb.sessions import direct
from tests.support.waiting import until

_TIMEOUT_SECONDS = 30.0


async def start_drain(stack: Stack, node: Tidb) -> None:
    """Drain a node without waiting."""
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()


async def drain(stack: Stack, node: Tidb, seconds: float = _TIMEOUT_SECONDS) -> None:
    """Drain a node until no session is left."""
    await start_drain(stack, node)
    await until_state(stack, node, "drained", seconds)


async def undrain(stack: Stack, node: Tidb) -> None:
    """Return a node to service."""
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await until_state(stack, node, "active")


async def until_state(stack: Stack, node: Tidb, state: str, seconds: float = _TIMEOUT_SECONDS) -> None:
    """Wait until a node is in this state."""

    async def is_reached() -> bool:
        return (await stack.states()).get(node.address) == state

    await stack.wait_until(is_reached, f"{node.address} {state}", seconds)


async def moves(stack: Stack) -> dict[tuple[str, str, str], int]:
    """How many moves have ended, by source node, result and reason."""
    page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
    return {(node, result, reason): count for node, result, reason, count in moves_told(page) if count}


async def until_admitted(nodes: Sequence[Tidb], user: str, password: str = "") -> None:
    """Wait until a new user may log in at all nodes: each reloads its privileges at its own time."""
    await until(lambda: all(admits(node, user, password) for node in nodes))


def admits(node: Tidb, user: str, password: str = "") -> bool:
    """Whether the user may log in there."""
    try:
        direct(node, user=user, password=password).close()
    except pymysql.err.OperationalError:
        return False
    return True

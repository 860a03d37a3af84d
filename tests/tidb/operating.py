"""What an operator does to nodes, and the waiting for it."""

from __future__ import annotations

from bench.rolling import moves_told
from sandbox.stack import Stack
from sandbox.tidb import Tidb

_SECONDS = 30.0


async def start_drain(stack: Stack, node: Tidb) -> None:
    """Drain a node, and do not wait for anything."""
    (await stack.api.post(f"/v1/nodes/{node.address}/drain")).raise_for_status()


async def drain(stack: Stack, node: Tidb, seconds: float = _SECONDS) -> None:
    """Drain a node until no session is left."""
    await start_drain(stack, node)
    await until_state(stack, node, "drained", seconds)


async def undrain(stack: Stack, node: Tidb, seconds: float = _SECONDS) -> None:
    """Put a node back into service."""
    (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
    await until_state(stack, node, "active", seconds)


async def until_state(stack: Stack, node: Tidb, state: str, seconds: float = _SECONDS) -> None:
    """Wait until a node is in this state."""

    async def is_in_it() -> bool:
        return (await stack.states()).get(node.address) == state

    await stack.wait_until(is_in_it, f"{node.address} {state}", seconds)


async def moves(stack: Stack) -> dict[tuple[str, str, str], int]:
    """How many moves have ended so, by the node that was left, result and reason."""
    page = (await stack.envoy.get("/stats/prometheus?filter=^tidevoy")).text
    return {(node, result, reason): count for node, result, reason, count in moves_told(page) if count}

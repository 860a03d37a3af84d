"""A check that clients do not notice the restart of a TiDB server in the stack of docker-compose.yml."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial

from tests.support.compose.stack import Stack, wait_until
from tests.support.compose.stateful_sessions import run_stateful_sessions


async def check_server_restart(
    stack: Stack, service: str, hostnames: Mapping[str, str], session_count: int
) -> None:
    """Restart `service` with docker-compose under load.

    Check that the server's sessions migrate because it announces its shutdown: it is not drained.
    `hostnames` are the host names that the services of all TiDB servers report to clients.
    """
    address = f"{service}:4000"
    others = {name for other, name in hostnames.items() if other != service}
    stop = asyncio.Event()
    async with run_stateful_sessions(stack.sql_port, session_count) as sessions:
        affected = [session for session in sessions if await session.node_address() == hostnames[service]]
        # Half of them send statements. The others send nothing until they have migrated.
        idle = affected[::2]
        working = [session for session in sessions if session not in idle]
        assert len(affected) > 1
        before = await stack.started(service)
        moved_before = (await stack.migration_results(address))["moved"]
        async with asyncio.TaskGroup() as tasks:
            for session in working:
                tasks.create_task(session.run(stop))
            restart = tasks.create_task(stack.compose("restart", service))
            migrations = moved_before + len(affected)
            await wait_until("all have migrated", partial(_have_migrated, stack, address, migrations))
            # Check at once, because sessions may return to the server when it is active again.
            counts_by_node = Counter([await session.node_address() for session in idle])
            await restart
            stop.set()
        assert await stack.started(service) > before
        print(
            f"\n{len(affected)} of {session_count} sessions were on {address}; its {len(idle)} idle sessions"
            f" moved to {dict(counts_by_node)}; {sum(session.finished_turns for session in working)} turns,"
            f" slowest answer {max(session.max_latency_seconds for session in sessions) * 1000:.0f} ms"
        )
        assert set(counts_by_node) <= others
        assert all(session.visited_nodes & others for session in working)
        await wait_until(f"{address} is active again", partial(stack.is_in_state, address, "active"))
        await wait_until("new sessions get there", partial(stack.gets_sessions, hostnames[service]))
        for session in sessions:
            await session.check()


async def _have_migrated(stack: Stack, address: str, count: int) -> bool:
    results = await stack.migration_results(address)
    assert results["lost"] == 0
    return results["moved"] >= count

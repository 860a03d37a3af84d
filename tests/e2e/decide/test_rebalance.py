"""An undrained node gets its share of the sessions, and the access log records the nodes of each session."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.e2e.cluster import counting_client, reload_settings, run_cluster
from tests.support.tidb_sim_clients import error_code

CLIENTS = 60


async def test_undrained_node_gets_its_share(tmp_path: Path, mariadb: MariaDb) -> None:
    log = tmp_path / "sessions.log"
    settings = {
        "balance": {"slow_start": 0},
        # Counts that are late while the clients connect would cause other migrations.
        "rebalance": {"enabled": False},
        "drain": {"reconnect_grace": 0},
        "sql": {"access_log": str(log)},
    }
    arguments = SessionCertificate.load_or_create(tmp_path).arguments
    async with (
        run_cluster(tmp_path / "stack", mariadb, nodes=3, arguments=arguments, settings=settings) as stack,
        AsyncExitStack() as exit_stack,
    ):
        undrained = stack.tidb[0].address

        async def is_in(state: str) -> bool:
            return (await stack.states())[undrained] == state

        async def sessions() -> dict[str, int]:
            return {address: node["sessions"] for address, node in (await stack.nodes()).items()}

        (await stack.api.post(f"/v1/nodes/{undrained}/drain")).raise_for_status()
        await stack.wait_until(lambda: is_in("drained"), "an empty node", 30)
        clients = [
            await exit_stack.enter_async_context(counting_client(stack.sql_port)) for _ in range(CLIENTS)
        ]
        for client in clients:
            assert error_code(await client.log_in()) == 0

        async def are_all_counted() -> bool:
            """Return whether the Envoy and the nodes themselves have counted all sessions."""
            nodes = (await stack.nodes()).values()
            return all(sum(node[key] for node in nodes) == CLIENTS for key in ("sessions", "connections"))

        await stack.wait_until(are_all_counted, "all sessions", 30)
        (await stack.api.post(f"/v1/nodes/{undrained}/undrain")).raise_for_status()
        await stack.wait_until(lambda: is_in("active"), "the node to be active", 30)
        await reload_settings(stack, rebalance={"enabled": True})

        async def is_fair() -> bool:
            return all(abs(count - CLIENTS / 3) <= 2 for count in (await sessions()).values())

        await stack.wait_until(is_fair, "fair shares", 30)
        for client in clients:
            assert error_code(await client.send_command(MySqlCommand.PING)) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    migrated = [line for line in lines if line["moves"]]
    assert len(lines) == CLIENTS
    # The log is exact, but the API's counts may lack the last migration. The log has a `node`, the last node,
    # only for a session that has migrated.
    shares = Counter(line["node"] or line["first_node"] for line in lines)
    assert all(abs(shares[node.address] - CLIENTS / 3) <= 2 for node in stack.tidb), shares
    assert shares[undrained] == sum(line["node"] == undrained for line in migrated) == len(migrated)
    assert Counter(line["moves"] for line in migrated) == {1: len(migrated)}
    assert all(line["first_node"] not in (None, undrained) for line in lines)

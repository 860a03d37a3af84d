"""If a node has reached its max_connections, clients get the same answers as without Tidevoy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import make_node_plan, make_plan, run_xds_test_bed
from tests.support.module.bootstrap import require_module
from tests.support.module.connection_limit import (
    BURST_LOGINS,
    CONNECTION_LIMIT,
    TOO_MANY_CONNECTIONS,
    LoginResults,
    log_in_repeatedly,
)
from tests.support.tidb_sim_clients import session_rules

TOO_MANY_CONNECTIONS_PACKET = b"\x17\x00\x00\x00\xff\x10\x04Too many connections"


@contextlib.asynccontextmanager
async def run_sims(mariadb: MariaDb, *limits: int) -> AsyncIterator[list[TidbSim]]:
    """Run one simulated TiDB server for each limit of `max_connections`; 0 means unlimited."""
    async with contextlib.AsyncExitStack() as stack:
        settings = [SimSettings(session_rules(mariadb, max_connections=limit)) for limit in limits]
        yield [await stack.enter_async_context(TidbSim(sim_settings)) for sim_settings in settings]


async def log_in_through_envoy(
    ports: Ports, envoy_process: StartEnvoy, nodes: Sequence[str], module: Path | None, **options: int
) -> LoginResults:
    """Log in repeatedly through an Envoy that a control plane configures. Return the results."""
    async with run_xds_test_bed(ports, envoy_process, module=module) as test_bed:
        await test_bed.publish(
            make_plan(*(make_node_plan(f"n{number}:4000", node) for number, node in enumerate(nodes)))
        )
        (await test_bed.wait_for_session()).close()
        return await log_in_repeatedly(f"127.0.0.1:{test_bed.sql_port}", **options)


@pytest.mark.parametrize("with_module", [True, False], ids=["module", "none"])
async def test_single_full_node_answers_as_without_tidevoy(
    ports: Ports, envoy_process: StartEnvoy, mariadb: MariaDb, with_module: bool
) -> None:
    async with run_sims(mariadb, CONNECTION_LIMIT) as (sim,):
        direct = await log_in_repeatedly(sim.sql_address)
        assert direct.burst == Counter(
            {"ok": CONNECTION_LIMIT, TOO_MANY_CONNECTIONS: BURST_LOGINS - CONNECTION_LIMIT}
        )
        assert set(direct.later) == {"ok"}
        module = require_module() if with_module else None
        assert await log_in_through_envoy(ports, envoy_process, [sim.sql_address], module) == direct
        assert direct.packets == {TOO_MANY_CONNECTIONS_PACKET}


async def test_full_node_is_skipped_if_others_have_room(
    ports: Ports, envoy_process: StartEnvoy, mariadb: MariaDb
) -> None:
    async with run_sims(mariadb, 5, 0, 0) as nodes:
        results = await log_in_through_envoy(
            ports, envoy_process, [node.sql_address for node in nodes], require_module()
        )
        assert results.burst == Counter({"ok": BURST_LOGINS})
        assert set(results.later) == {"ok"}
        assert results.packets == frozenset()

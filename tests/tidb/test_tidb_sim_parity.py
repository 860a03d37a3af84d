"""The simulated TiDB server (sandbox/tidb_sim) behaves like a real server wherever Tidevoy relies on TiDB.

So tests with simulated servers are valid for TiDB. tests/support/tidb/tidb_behaviors.py excludes the intended
differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.cluster import FakeCluster
from sandbox.ports import Ports
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb import tidb_behaviors
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.tidb_behaviors import Behavior
from tests.tidb.conftest import GRACEFUL_WAIT

MAX_CONNECTIONS = 2
BEHAVIORS: tuple[Behavior, ...] = (
    tidb_behaviors.greeting,
    tidb_behaviors.status_page,
    tidb_behaviors.kill_of_an_idle_session,
    tidb_behaviors.kill_of_a_busy_session,
    tidb_behaviors.kill_of_an_unknown_session,
    tidb_behaviors.wait_timeout,
    tidb_behaviors.client_that_does_not_log_in,
    tidb_behaviors.refused_logins,
    tidb_behaviors.commands,
    tidb_behaviors.statements,
    tidb_behaviors.states,
    tidb_behaviors.empty_states,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def simulated_cluster(
    tmp_path_factory: pytest.TempPathFactory, shared_cluster: TidbCluster
) -> AsyncIterator[FakeCluster]:
    """Run two simulated servers with the real servers' certificate; the second accepts MAX_CONNECTIONS."""
    files = shared_cluster.certificate
    tls = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    signing = ("--session-token-signing-cert", str(files.cert), "--session-token-signing-key", str(files.key))
    with Ports() as ports:
        cluster = FakeCluster(
            tmp_path_factory.mktemp("simulated"),
            ports,
            graceful_wait=GRACEFUL_WAIT,
            arguments=(*tls, *signing),
        )
        try:
            await cluster.launch(1, lambda text: None)
            await cluster.new_node(("--max-connections", str(MAX_CONNECTIONS))).launch()
            yield cluster
        finally:
            await cluster.stop()


@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda behavior: behavior.__name__)
async def test_simulated_server_behaves_like_tidb(
    behavior: Behavior, cluster: TidbCluster, simulated_cluster: FakeCluster
) -> None:
    real, simulated = await asyncio.gather(behavior(cluster.tidb[0]), behavior(simulated_cluster.tidb[0]))
    assert simulated == real


async def test_simulated_server_registers_like_tidb(
    cluster: TidbCluster, simulated_cluster: FakeCluster
) -> None:
    real = await tidb_behaviors.registration(cluster, cluster.tidb[0])
    assert await tidb_behaviors.registration(simulated_cluster, simulated_cluster.tidb[0]) == real


async def test_full_simulated_server_rejects_like_tidb(
    cluster: TidbCluster, simulated_cluster: FakeCluster, global_variables: GlobalVariables
) -> None:
    global_variables.set("max_connections", MAX_CONNECTIONS, cluster.tidb[0])
    real = await tidb_behaviors.full_server(cluster.tidb[0], MAX_CONNECTIONS)
    assert await tidb_behaviors.full_server(simulated_cluster.tidb[1], MAX_CONNECTIONS) == real


async def test_simulated_server_shuts_down_like_tidb(
    cluster: TidbCluster, simulated_cluster: FakeCluster
) -> None:
    node = simulated_cluster.new_node()
    await node.launch()
    real, simulated = await asyncio.gather(
        tidb_behaviors.graceful_shutdown(cluster.tidb[2]), tidb_behaviors.graceful_shutdown(node)
    )
    assert simulated == real

"""The simulated TiDB server (sandbox/tidb_sim) behaves like each release wherever Tidevoy relies on TiDB.

So tests with simulated servers are valid for TiDB. tests/support/tidb/tidb_behaviors.py excludes the intended
differences, and release_differences.py names those of older releases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.cluster import FakeCluster
from sandbox.ports import Ports
from sandbox.tidb_binaries import TidbRelease
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb import tidb_behaviors
from tests.support.tidb.global_variables import restoring_variables
from tests.support.tidb.release_differences import possible_results
from tests.support.tidb.tidb_behaviors import Behavior
from tests.tidb.conftest import GRACEFUL_WAIT
from tests.tidb.releases.conftest import node_of

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
    tmp_path_factory: pytest.TempPathFactory, mixed_cluster: TidbCluster
) -> AsyncIterator[FakeCluster]:
    """Run two simulated servers with the real servers' certificate; the second accepts MAX_CONNECTIONS."""
    files = mixed_cluster.certificate
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
    behavior: Behavior, cluster: TidbCluster, release: TidbRelease, simulated_cluster: FakeCluster
) -> None:
    node = node_of(cluster, release)
    real, simulated = await asyncio.gather(behavior(node), behavior(simulated_cluster.tidb[0]))
    assert real in possible_results(behavior.__name__, release, simulated)


async def test_simulated_server_registers_like_tidb(
    cluster: TidbCluster, release: TidbRelease, simulated_cluster: FakeCluster
) -> None:
    node = node_of(cluster, release)
    real = await tidb_behaviors.registration(cluster, node)
    assert await tidb_behaviors.registration(simulated_cluster, simulated_cluster.tidb[0]) == real


async def test_full_simulated_server_rejects_like_tidb(
    cluster: TidbCluster, release: TidbRelease, simulated_cluster: FakeCluster
) -> None:
    node = node_of(cluster, release)
    async with restoring_variables(cluster) as variables:
        variables.set("max_connections", MAX_CONNECTIONS, node)
        real = await tidb_behaviors.full_server(node, MAX_CONNECTIONS)
    assert await tidb_behaviors.full_server(simulated_cluster.tidb[1], MAX_CONNECTIONS) == real


async def test_simulated_server_shuts_down_like_tidb(
    cluster: TidbCluster, release: TidbRelease, simulated_cluster: FakeCluster
) -> None:
    node = node_of(cluster, release)
    simulated_node = simulated_cluster.new_node()
    await simulated_node.launch()
    real, simulated = await asyncio.gather(
        tidb_behaviors.graceful_shutdown(node), tidb_behaviors.graceful_shutdown(simulated_node)
    )
    assert real in possible_results("graceful_shutdown", release, simulated)

"""The stand-in (sandbox/tidb_sim) behaves like a real TiDB wherever Tidevoy relies on TiDB's behaviour.

So the results of tests with stand-ins hold for TiDB, too. Intended differences are listed in facts.py.
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
from tests.support.tidb.tidb_behaviors import Fact
from tests.tidb.conftest import GRACEFUL_WAIT

MAX_CONNECTIONS = 2
FACTS: tuple[Fact, ...] = (
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
async def stand_ins(
    tmp_path_factory: pytest.TempPathFactory, shared_cluster: TidbCluster
) -> AsyncIterator[FakeCluster]:
    """Two stand-ins with the certificate of the real servers; the second accepts MAX_CONNECTIONS."""
    files = shared_cluster.certificate
    tls = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    signing = ("--session-token-signing-cert", str(files.cert), "--session-token-signing-key", str(files.key))
    with Ports() as ports:
        cluster = FakeCluster(
            tmp_path_factory.mktemp("stand-ins"),
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


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
async def test_both_behave_alike(fact: Fact, cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    real, fake = await asyncio.gather(fact(cluster.tidb[0]), fact(stand_ins.tidb[0]))
    assert fake == real


async def test_both_register_alike(cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    real = await tidb_behaviors.registration(cluster, cluster.tidb[0])
    assert await tidb_behaviors.registration(stand_ins, stand_ins.tidb[0]) == real


async def test_both_refuse_alike_when_they_are_full(
    cluster: TidbCluster, stand_ins: FakeCluster, global_variables: GlobalVariables
) -> None:
    global_variables.set("max_connections", MAX_CONNECTIONS, cluster.tidb[0])
    real = await tidb_behaviors.full_server(cluster.tidb[0], MAX_CONNECTIONS)
    assert await tidb_behaviors.full_server(stand_ins.tidb[1], MAX_CONNECTIONS) == real


async def test_both_shut_down_alike(cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    """Must run last: it stops the stand-in that the other tests use."""
    real, fake = await asyncio.gather(
        tidb_behaviors.graceful_shutdown(cluster.tidb[2]), tidb_behaviors.graceful_shutdown(stand_ins.tidb[0])
    )
    assert fake == real

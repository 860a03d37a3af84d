"""The stand-in does what a real TiDB does where Tidevoy relies on it: both are asked the same.

So what the other tests find with stand-ins holds for TiDB. Where the two differ on purpose, facts.py says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.cluster import FakeCluster
from sandbox.ports import Ports
from sandbox.tidb_cluster import TidbCluster
from tests.tidb import facts
from tests.tidb.conftest import GRACEFUL_WAIT
from tests.tidb.facts import Fact
from tests.tidb.variables import GlobalVariables

FULL = 2
FACTS: tuple[Fact, ...] = (
    facts.greeting,
    facts.status_page,
    facts.idle_session_that_is_killed,
    facts.busy_session_that_is_killed,
    facts.session_that_is_not_there,
    facts.session_that_is_idle_for_too_long,
    facts.login_that_never_comes,
    facts.logins_that_are_refused,
    facts.commands,
    facts.statements,
    facts.states,
    facts.states_that_tell_nothing,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stand_ins(
    tmp_path_factory: pytest.TempPathFactory, shared_cluster: TidbCluster
) -> AsyncIterator[FakeCluster]:
    """Two stand-ins with the certificates of the real servers; the second takes few clients."""
    files = shared_cluster.certificates
    certificates = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    signing = ("--session-token-signing-cert", str(files.cert), "--session-token-signing-key", str(files.key))
    with Ports() as ports:
        cluster = FakeCluster(
            tmp_path_factory.mktemp("stand-ins"),
            ports,
            graceful_wait=GRACEFUL_WAIT,
            arguments=(*certificates, *signing),
        )
        try:
            await cluster.launch(1, lambda text: None)
            await cluster.new_node(("--max-connections", str(FULL))).launch()
            yield cluster
        finally:
            await cluster.end()


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
async def test_both_do_the_same(fact: Fact, cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    real, fake = await asyncio.gather(fact(cluster.tidb[0]), fact(stand_ins.tidb[0]))
    assert fake == real


async def test_both_register_alike(cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    real = await facts.registration(cluster, cluster.tidb[0])
    assert await facts.registration(stand_ins, stand_ins.tidb[0]) == real


async def test_both_refuse_alike_when_they_are_full(
    cluster: TidbCluster, stand_ins: FakeCluster, global_variables: GlobalVariables
) -> None:
    global_variables.set("max_connections", FULL, cluster.tidb[0])
    real = await facts.full_server(cluster.tidb[0], FULL)
    assert await facts.full_server(stand_ins.tidb[1], FULL) == real


async def test_both_end_gracefully_in_the_same_order(cluster: TidbCluster, stand_ins: FakeCluster) -> None:
    real, fake = await asyncio.gather(
        facts.graceful_end(cluster.tidb[2]), facts.graceful_end(stand_ins.tidb[0])
    )
    assert fake == real

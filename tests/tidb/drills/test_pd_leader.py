"""The leader of three members of PD is lost under load: killed, or suspended so that connections to it hang.

The others elect a new leader. Until then, statements that need a timestamp wait. `make soak` repeats it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb_binaries import TidbBinaries
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_servers import PdServer
from tests.support.controlplane.api_server import stored_events
from tests.support.soak import SOAK
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.node_operations import wait_for_state
from tests.support.tidb.sessions import connect, connect_directly, query_rows
from tests.support.waiting import wait_until

NODES, PD_MEMBERS = 2, 3
ROUNDS = 5 if SOAK else 1
MAX_STATEMENT_SECONDS = 30.0
RECOVERY_SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pd_cluster(
    tmp_path_factory: pytest.TempPathFactory, tidb_bin: TidbBinaries
) -> AsyncIterator[TidbCluster]:
    """Run a cluster whose PD has three members, for the tests of this file."""
    directory = tmp_path_factory.mktemp("tidb-pd3")
    async with TidbCluster.start(directory, tidb_bin, nodes=NODES, pd_members=PD_MEMBERS) as started:
        yield started


@pytest.fixture
async def stack(
    tmp_path_factory: pytest.TempPathFactory, shared_pd_cluster: TidbCluster
) -> AsyncIterator[LocalCluster]:
    """Run a control plane that watches the leader of PD, and an Envoy; restore the cluster afterwards."""
    cluster = shared_pd_cluster
    leader = await cluster.pd_leader()
    assert leader is not None
    # The control plane uses the first member that answers.
    urls = sorted(cluster.pd_urls, key=lambda url: url != leader.url)
    directory = tmp_path_factory.mktemp("stack")
    try:
        async with LocalCluster.start(directory, cluster=cluster, settings={"pd": {"urls": urls}}) as started:
            yield started
            assert started.violations() == []
            assert started.bugs() == []
    finally:
        await cluster.restore(NODES)


async def has_healthy_members(member: PdServer, count: int) -> bool:
    """Return whether this member of PD reports so many healthy members."""
    async with http_client(member.url) as client:
        response = await client.get("/pd/api/v1/health")
    return response.status_code == 200 and sum(entry["health"] for entry in response.json()) == count


@pytest.mark.timeout(900 if SOAK else 240)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
async def test_loss_of_the_pd_leader_only_delays_statements(
    stack: LocalCluster, shared_pd_cluster: TidbCluster, how: signal.Signals
) -> None:
    cluster, database = shared_pd_cluster, f"pd_leader_{how.name.lower()}"
    with connect_directly(cluster.tidb[0]) as connection:
        query_rows(connection, f"create database {database}")
    for _ in range(ROUNDS):
        await lose_leader(stack, cluster, database, how)


async def lose_leader(stack: LocalCluster, cluster: TidbCluster, database: str, how: signal.Signals) -> None:
    """Lose the leader under load, start a TiDB server meanwhile, and return the member."""
    leader = await cluster.pd_leader()
    assert leader is not None
    others = [member for member in cluster.pd_members if member is not leader]
    last_event = max(event["id"] for event in await stored_events(stack.api))

    async def source_events() -> list[str]:
        events = await stored_events(stack.api, last_event)
        return [event["kind"] for event in events if event["kind"].startswith("source.")]

    async def outage_is_over() -> bool:
        # One outage can have several events, with different reasons.
        return (await source_events())[-1:] in ([], ["source.recovered"])

    async def has_new_leader() -> bool:
        return await cluster.pd_leader() not in (None, leader)

    async with (
        DrillLoad(stack.sql_port, database, clients=6, statements_per_second=60) as writers,
        DrillLoad(
            stack.sql_port, database, clients=6, statements_per_second=60, statement="select {client}"
        ) as readers,
    ):
        lost_at = time.monotonic()
        leader.process.send_signal(how)
        await wait_until(has_new_leader, RECOVERY_SECONDS)
        elected = time.monotonic() - lost_at
        await writers.wait_for_statements(RECOVERY_SECONDS)
        writing = time.monotonic() - lost_at
        await wait_until(outage_is_over, RECOVERY_SECONDS)
        outages = (await source_events()).count("source.outage")
        # Discovery works while the member is away.
        new_node = cluster.new_node()
        started_at = time.monotonic()
        await new_node.launch()
        serving = time.monotonic()
        await wait_for_state(stack, new_node, "active")
        discovered, started = time.monotonic() - serving, serving - started_at
        assert not await has_healthy_members(others[0], PD_MEMBERS)
        if how is signal.SIGKILL:
            await leader.launch()
        else:
            leader.process.send_signal(signal.SIGCONT)
        await wait_until(lambda: has_healthy_members(others[0], PD_MEMBERS), RECOVERY_SECONDS)
        await writers.wait_for_statements(RECOVERY_SECONDS)
        await asyncio.to_thread(lambda: connect(stack.sql_port, database).close())
    events = await stored_events(stack.api, last_event)
    print(
        f"\ndrill pd_leader: {how.name}; new leader after {elected:.1f} s, all writers after {writing:.1f} s;"
        f" slowest statement with a timestamp {writers.slowest_seconds:.1f} s, without one"
        f" {readers.slowest_seconds:.2f} s; {writers.statements} writes, {len(writers.errors)} errors;"
        f" {outages} source.outage; a TiDB server started in {started:.1f} s and was active after"
        f" {discovered:.1f} s"
    )
    assert readers.errors == []
    assert writers.errors == []
    assert writers.slowest_seconds < MAX_STATEMENT_SECONDS
    with connect(stack.sql_port, database) as connection:
        rows = query_rows(connection, "select n from drill_load order by id")
    assert [n for (n,) in rows] == writers.increments
    # No node left service. (The added server of the previous round does.)
    lasting = {node.address for node in cluster.tidb[:NODES]}
    assert not [event for event in events if event["kind"] == "node.state" and event["subject"] in lasting]
    await new_node.terminate()
    cluster.tidb.remove(new_node)

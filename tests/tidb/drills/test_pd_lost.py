"""PD is lost for a while under load: killed, or suspended so that connections to it hang.

All nodes lose PD together. Statements that need a timestamp wait or fail, but all sessions and all nodes must
stay, and sessions must still migrate. `make soak` takes PD away for 5 minutes.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from controlplane.etcd.client import EtcdClient
from controlplane.observe.discovery.pd_registrations import TIDB_PREFIX
from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.controlplane.api_server import stored_events
from tests.support.soak import SOAK
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.node_operations import migration_counts, start_drain, undrain, wait_for_state
from tests.support.tidb.sessions import (
    Connection,
    TrackedSessions,
    connect,
    query_rows,
    query_value,
    session_port,
)
from tests.support.waiting import assert_never, wait_until

LOSS_SECONDS = 300.0 if SOAK else 15.0
OBSERVED_AFTERWARDS_SECONDS = 90.0 if SOAK else 3.0
"""In the long form longer than `drain.registration_grace`: no node may leave because of its registration."""
RECOVERY_SECONDS = 200.0 if SOAK else 30.0
"""After a long loss, TiDB's client for the GC safe point (tikv/safepoint.go in client-go) reconnects after
up to 144 s, with gRPC's default backoff. Until then, statements that read or write rows fail."""
MAX_STATEMENT_SECONDS = 140.0
"""TiDB answers 9001 (PD server timeout) after 96 to 120 s."""
CLIENTS, STATEMENTS_PER_SECOND = 6, 60
FIRST_RENEWAL_SECONDS = 300.0
"""A TiDB server renews its id in PD every 5 min. If the first renewal fails, it closes all sessions and
rejects new ones; later it does so after 6 h without PD (serverIDKeeper in TiDB's pkg/domain/domain.go)."""
DRILL_SECONDS = LOSS_SECONDS + 25.0
"""From the start of the test until PD is back."""
AVOIDANCE_SECONDS = FIRST_RENEWAL_SECONDS + 20.0
"""The servers may have started one after the other, so that all their first renewals have to pass."""


@pytest.fixture
async def stack(
    tmp_path_factory: pytest.TempPathFactory, cluster: TidbCluster
) -> AsyncIterator[LocalCluster]:
    """Run a stack that rebalances, as it is by default: PD's loss must not make it move sessions about."""
    async with LocalCluster.start(tmp_path_factory.mktemp("stack"), cluster=cluster) as started:
        yield started
        assert started.violations() == []
        assert started.bugs() == []


async def lose_pd(cluster: TidbCluster, how: signal.Signals) -> None:
    cluster.pd.process.send_signal(how)
    if how is signal.SIGKILL:
        await cluster.pd.process.wait()


async def return_pd(cluster: TidbCluster, how: signal.Signals) -> None:
    if how is signal.SIGKILL:
        await cluster.pd.launch()
    else:
        cluster.pd.process.send_signal(signal.SIGCONT)


async def has_event(stack: LocalCluster, kind: str) -> bool:
    return any(event["kind"] == kind for event in await stored_events(stack.api))


async def registered(cluster: TidbCluster) -> set[str]:
    """Return the keys in PD that exist only while servers run."""
    async with EtcdClient(cluster.pd_urls) as client:
        return {key for key in (await client.range(TIDB_PREFIX)).entries if key.endswith("/ttl")}


async def no_first_renewal_is_near(stack: LocalCluster) -> bool:
    """Return whether no TiDB server will renew its id for the first time while PD is lost."""
    starts = [datetime.fromisoformat(node["started_at"]) for node in (await stack.nodes()).values()]
    uptimes = [(datetime.now(UTC) - start).total_seconds() for start in starts]
    return not any(
        FIRST_RENEWAL_SECONDS - DRILL_SECONDS < uptime < FIRST_RENEWAL_SECONDS + 10.0 for uptime in uptimes
    )


async def log_in(stack: LocalCluster, database: str) -> float:
    """Log in, run a statement, and return how many seconds that took."""
    started_at = time.monotonic()
    with await asyncio.to_thread(connect, stack.sql_port, database) as connection:
        assert await asyncio.to_thread(query_value, connection, "select 1") == 1
    return time.monotonic() - started_at


async def moved_away(stack: LocalCluster, node: Tidb) -> int:
    """Return how many sessions have migrated away from a node."""
    return (await migration_counts(stack)).get((node.address, "moved", "ok"), 0)


async def only_writers_remain(observer: Connection) -> bool:
    """Return whether all other sessions of the observer's node wait in a statement that needs PD."""
    own_id = query_value(observer, "select connection_id()")
    rows = await asyncio.to_thread(query_rows, observer, "show full processlist")
    return all(str(row[7]).startswith("update") for row in rows if row[0] != own_id)


@pytest.mark.timeout(1800 if SOAK else 500)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
async def test_no_session_and_no_node_is_lost_with_pd(
    stack: LocalCluster,
    cluster: TidbCluster,
    sessions: TrackedSessions,
    database: str,
    how: signal.Signals,
) -> None:
    node, *others = stack.tidb
    processes = [server.process for server in stack.tidb]
    await wait_until(lambda: no_first_renewal_is_near(stack), AVOIDANCE_SECONDS)
    keys = await registered(cluster)
    assert len(keys) == len(stack.tidb)
    idle = [sessions.on_node(server) for server in [node] * 4 + others]
    for number, session in enumerate(idle):
        query_rows(session, f"set @number = {number}")
        query_rows(session, "prepare doubled from 'select @number * 2'")
    observer = sessions.direct(node)

    async def other_node_is_inactive() -> bool:
        states = await stack.states()
        return any(states.get(other.address) != "active" for other in others)

    async with (
        DrillLoad(
            stack.sql_port, database, clients=CLIENTS, statements_per_second=STATEMENTS_PER_SECOND
        ) as writers,
        DrillLoad(
            stack.sql_port,
            database,
            clients=CLIENTS,
            statements_per_second=STATEMENTS_PER_SECOND,
            statement="select {client}",
        ) as readers,
    ):
        lost_at = time.monotonic()
        await lose_pd(cluster, how)
        await wait_until(lambda: has_event(stack, "source.outage"))
        noticed = time.monotonic() - lost_at
        # Nothing that needs no timestamp waits for PD.
        await readers.wait_for_statements(5.0)
        login = await log_in(stack, database)
        started_at = time.monotonic()
        await start_drain(stack, node)
        await wait_until(lambda: only_writers_remain(observer))
        moved = time.monotonic() - started_at
        assert node.port not in {session_port(session) for session in idle}
        await assert_never(other_node_is_inactive, max(0.1, lost_at + LOSS_SECONDS - time.monotonic()))
        late_login = await log_in(stack, database)
        await readers.wait_for_statements(5.0)
        left = await moved_away(stack, node)
        errors_of_loss = len(writers.errors)

        returned_at = time.monotonic()
        await return_pd(cluster, how)
        started = time.monotonic() - returned_at
        await wait_until(lambda: has_event(stack, "source.recovered"), RECOVERY_SECONDS)
        discovery = time.monotonic() - returned_at
        await writers.wait_for_statements(RECOVERY_SECONDS)
        recovery = time.monotonic() - returned_at
        await wait_for_state(stack, node, "drained")
        await undrain(stack, node)

        async def is_registered() -> bool:
            return await registered(cluster) == keys

        await assert_never(other_node_is_inactive, OBSERVED_AFTERWARDS_SECONDS)
        await wait_until(is_registered, RECOVERY_SECONDS)
        await log_in(stack, database)
    balanced = [await moved_away(stack, other) for other in others]
    print(
        f"\ndrill pd_lost: {how.name} for {returned_at - lost_at:.0f} s; source.outage after {noticed:.1f} s;"
        f" logins took {login:.2f} s and {late_login:.2f} s; idle and reading sessions left in {moved:.2f} s,"
        f" {left} sessions while PD was away, {sum(balanced)} were moved from other nodes; slowest statement"
        f" without a timestamp {readers.slowest_seconds:.2f} s, with one {writers.slowest_seconds:.1f} s;"
        f" {writers.statements} writes, {errors_of_loss} errors while PD was away,"
        f" {len(writers.errors) - errors_of_loss} afterwards; PD started in {started:.1f} s, source.recovered"
        f" after {discovery:.1f} s, all writers after {recovery:.1f} s"
    )
    for errors in (writers.errors[:errors_of_loss], writers.errors[errors_of_loss:]):
        print("  errors:", dict(Counter(error.split(" ", 2)[2] for error in errors)))
    assert readers.errors == []
    assert readers.slowest_seconds < 5.0
    assert writers.lost_sessions == 0
    assert writers.slowest_seconds < MAX_STATEMENT_SECONDS
    assert [query_value(session, "execute doubled") for session in idle] == [
        2 * number for number in range(len(idle))
    ]
    # Each confirmed commit is there. A commit whose confirmation failed may be there as well.
    with connect(stack.sql_port, database) as connection:
        rows = query_rows(connection, "select n from drill_load order by id")
    assert all(n >= confirmed for (n,), confirmed in zip(rows, writers.increments, strict=True))
    assert sum(n for (n,) in rows) <= writers.statements + len(writers.errors)
    assert [server.process for server in stack.tidb] == processes  # nothing was restarted
    departures = [
        event
        for event in await stored_events(stack.api)
        if event["kind"] == "node.state" and event["data"]["to"] not in ("joining", "active")
    ]
    assert {event["subject"] for event in departures} == {node.address}  # only because of the drain

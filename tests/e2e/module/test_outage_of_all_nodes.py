"""No TiDB server accepts sessions for some seconds: new clients wait, and are served afterwards."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from tests.support.e2e.cluster import counting_client, run_cluster
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import error_code

pytestmark = pytest.mark.timeout(300)

CLIENTS, OUTAGE_SECONDS = (1_000, 4.0) if SOAK else (100, 2.0)
WAIT_FOR_NODE_SECONDS = 20.0  # no client has a shorter timeout
MANY_CLIENTS = 10_000 if SOAK else 200
NO_NODE = 1105


async def log_in_after(
    stack: LocalCluster, delay: float = 0.0, begun: asyncio.Event | None = None
) -> tuple[int, float]:
    """Return the error code of a login, 0 if it succeeds, and how many seconds it took.

    `begun` is set when the login begins.
    """
    await asyncio.sleep(delay)
    if begun is not None:
        begun.set()
    started_at = time.monotonic()
    async with counting_client(stack.sql_port) as client:
        code = error_code(await client.log_in())
        return code, time.monotonic() - started_at


@asynccontextmanager
async def no_node_in_service(stack: LocalCluster) -> AsyncIterator[None]:
    """All nodes are drained."""
    for node in stack.tidb:
        (await stack.api.post(f"/v1/nodes/{node.address}/drain", json={})).raise_for_status()

    async def has_no_node() -> bool:
        return not (await stack.envoy.stats(r"^cluster\.tidb\.membership_healthy$")).popitem()[1]

    await stack.wait_until(has_no_node, "no node in service")
    yield
    for node in stack.tidb:
        (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()


@asynccontextmanager
async def dead_nodes(stack: LocalCluster) -> AsyncIterator[None]:
    """All nodes have crashed. The control plane keeps them in service, since it has no better ones.

    Envoy has not noticed that yet.
    """
    await asyncio.gather(*(node.kill() for node in stack.tidb))
    yield
    await asyncio.gather(*(node.launch() for node in stack.tidb))


@pytest.mark.parametrize("outage", [no_node_in_service, dead_nodes])
async def test_clients_wait_until_a_node_accepts_sessions(
    tmp_path: Path, mariadb: MariaDb, outage: Callable[[LocalCluster], AbstractAsyncContextManager[None]]
) -> None:
    settings = {"sql": {"wait_for_node": WAIT_FOR_NODE_SECONDS}}
    async with run_cluster(tmp_path, mariadb, nodes=2, settings=settings) as stack:
        async with outage(stack):
            delays = [OUTAGE_SECONDS * number / (CLIENTS - 1) for number in range(CLIENTS)]
            last = asyncio.Event()
            logins = [
                asyncio.create_task(log_in_after(stack, delay, last if delay == OUTAGE_SECONDS else None))
                for delay in delays
            ]
            await last.wait()
        results = await asyncio.gather(*logins)
        longest = max(seconds for _, seconds in results)
        print(f"\n{CLIENTS} logins in {OUTAGE_SECONDS} s without nodes; the longest took {longest:.1f} s")
        assert Counter(code for code, _ in results) == {0: CLIENTS}
        assert OUTAGE_SECONDS < longest < WAIT_FOR_NODE_SECONDS


async def test_number_of_waiting_clients_is_limited(tmp_path: Path, mariadb: MariaDb) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = MANY_CLIENTS // 2
    settings = {"sql": {"wait_for_node": 60, "max_waiting_logins": limit}}
    async with run_cluster(tmp_path, mariadb, nodes=2, settings=settings) as stack:
        async with no_node_in_service(stack):
            logins = [asyncio.create_task(log_in_after(stack)) for _ in range(MANY_CLIENTS)]
            is_refused = lambda login: login.done() and login.result()[0] == NO_NODE  # noqa: E731
            await stack.wait_until(
                lambda: sum(map(is_refused, logins)) == MANY_CLIENTS - limit, "the others to be refused", 60.0
            )
            assert sum(login.done() for login in logins) == MANY_CLIENTS - limit
        results = await asyncio.gather(*logins)
        print(f"\n{MANY_CLIENTS} logins with {limit} that may wait: {Counter(code for code, _ in results)}")
        assert Counter(code for code, _ in results) == {0: limit, NO_NODE: MANY_CLIENTS - limit}

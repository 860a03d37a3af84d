"""No TiDB server is in service for some seconds: new clients wait, and are served afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from tests.support.e2e.cluster import counting_client, run_cluster
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import error_code

pytestmark = pytest.mark.timeout(180)

CLIENTS, OUTAGE_SECONDS = (1_000, 4.0) if SOAK else (100, 2.0)


async def log_in_after(stack: LocalCluster, delay: float) -> tuple[int, float]:
    """Return the error code of a login, 0 if it succeeds, and how many seconds it took."""
    await asyncio.sleep(delay)
    started_at = time.monotonic()
    async with counting_client(stack.sql_port) as client:
        code = error_code(await client.log_in())
        return code, time.monotonic() - started_at


async def test_clients_wait_until_a_node_is_in_service(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_cluster(tmp_path, mariadb, nodes=2) as stack:
        for node in stack.tidb:
            (await stack.api.post(f"/v1/nodes/{node.address}/drain", json={})).raise_for_status()

        async def has_no_node() -> bool:
            return not (await stack.envoy.stats(r"^cluster\.tidb\.membership_healthy$")).popitem()[1]

        await stack.wait_until(has_no_node, "no node in service")
        delays = [OUTAGE_SECONDS * number / CLIENTS for number in range(CLIENTS)]
        logins = [asyncio.create_task(log_in_after(stack, delay)) for delay in delays]
        await asyncio.sleep(OUTAGE_SECONDS)
        for node in stack.tidb:
            (await stack.api.post(f"/v1/nodes/{node.address}/undrain")).raise_for_status()
        results = await asyncio.gather(*logins)
        longest = max(seconds for _, seconds in results)
        print(f"\n{CLIENTS} logins in {OUTAGE_SECONDS} s without nodes; the longest took {longest:.1f} s")
        assert Counter(code for code, _ in results) == {0: CLIENTS}
        assert OUTAGE_SECONDS < longest < OUTAGE_SECONDS + 3.0

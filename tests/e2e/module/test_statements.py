"""Statistics of statements from a client's statement to `GET /v1/statements` and `tidevoy top`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import counting_client, reload_settings, run_cluster
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

STATEMENT, NORMALIZED = "SELECT 1", "select ?"
DIGEST = hashlib.sha256(NORMALIZED.encode()).hexdigest()
EXECUTIONS = 7
_WAIT_SECONDS = 10.0  # Envoys report every second.


async def get_statements(cluster: LocalCluster, **query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await cluster.api.get("/v1/statements", params=query)).raise_for_status().json()
    return answer


async def test_statements_of_a_client_are_counted(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_cluster(tmp_path, mariadb) as cluster, counting_client(cluster.sql_port) as client:
        assert error_code(await client.log_in()) == 0
        await client.query(STATEMENT)
        assert (await get_statements(cluster))["digests"] == "off"
        # Sessions that exist already are observed, too.
        result = await reload_settings(cluster, statements={"digests": "on", "interval": 1})
        assert set(result["applied_by_module"]) == {"statements.digests", "statements.interval"}

        async def is_counted() -> bool:
            await client.query(STATEMENT)
            return bool((await get_statements(cluster, digest=DIGEST))["statements"])

        await wait_until(is_counted, _WAIT_SECONDS)
        before = (await get_statements(cluster, digest=DIGEST))["statements"][0]["count"]
        for _ in range(EXECUTIONS):
            await client.query(STATEMENT)

        async def all_are_counted() -> bool:
            (statement,) = (await get_statements(cluster, digest=DIGEST))["statements"]
            return bool(statement["count"] >= before + EXECUTIONS)

        await wait_until(all_are_counted, _WAIT_SECONDS)
        (statement,) = (await get_statements(cluster, digest=DIGEST))["statements"]
        assert (statement["text"], statement["users"]) == (NORMALIZED, ["root"])
        assert statement["nodes"] == list(await cluster.nodes())
        assert statement["errors"] == 0
        assert 0 < statement["average_seconds"] < 1
        shown = await run_tidevoy(str(cluster.api.base_url), "top")
        assert f"{DIGEST[:12]}  {NORMALIZED}" in shown.stdout
        await reload_settings(cluster, statements={})
        assert (await get_statements(cluster))["statements"] == []

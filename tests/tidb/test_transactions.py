"""A session gets the same answers to BEGIN with and without a drain of its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from sandbox.tidb_sim.packets import Capability
from tests.support.migration.sql_client import Answer, AnswerClient, ErrorAnswer
from tests.support.migration.transaction_statements import (
    TRANSACTION_CASES,
    TransactionCase,
    find_differences,
    find_unexpected,
    run_cases,
    wait_until_greeted,
)
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import ModuleEnvoy, run_envoy
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.tidb_sim_clients import CAPABILITIES

_READ_ONLY = 1836


@dataclass
class ProxiedServers:
    """An Envoy in front of two servers, without a control plane."""

    proxy: ModuleEnvoy
    first: Tidb
    second: Tidb
    endpoints: Path

    def drain(self, *drained: Tidb) -> None:
        """Drain these servers, and no others."""
        publish_nodes(self.endpoints, _hosts((self.first, self.second), drained))

    async def connect(
        self, capabilities: Capability = CAPABILITIES, *, user: str = "root", database: str = ""
    ) -> AnswerClient:
        """Log in. Return a client whose answers can be compared."""
        return await AnswerClient.login(
            self.proxy.host, self.proxy.port, capabilities, user=user, database=database
        )


def _hosts(servers: Sequence[Tidb], drained: Sequence[Tidb]) -> list[Host]:
    return [Host(server.address, state="draining" if server in drained else "active") for server in servers]


@asynccontextmanager
async def run_proxied_servers(directory: Path, cluster: TidbCluster) -> AsyncIterator[ProxiedServers]:
    """Run an Envoy in front of two servers. Sessions begin on the first server."""
    first, second, *_ = cluster.tidb
    endpoints = directory / "endpoints.json"
    async with run_envoy(
        directory, _hosts((first, second), [second]), ModuleConfig(endpoints=endpoints)
    ) as proxy:
        yield ProxiedServers(proxy, first, second, endpoints)


async def test_begin_statements_have_the_same_answers_during_a_drain(
    tmp_path: Path, cluster: TidbCluster, database: str
) -> None:
    table = f"{database}.texts"
    async with run_proxied_servers(tmp_path, cluster) as servers:

        def recreate_table() -> None:
            with connect_directly(servers.first) as connection:
                query_rows(connection, f"drop table if exists {table}")
                query_rows(connection, f"create table {table} (id int primary key)")

        async def stay(*_: Sequence[TransactionCase]) -> None:
            pass

        async def undrain_first() -> None:
            async with servers.proxy.wait_applied():
                servers.drain(servers.second)

        async def drain_first(cases: Sequence[TransactionCase]) -> None:
            async with servers.proxy.wait_applied():
                servers.drain(servers.first)
            await wait_until_greeted(servers.second.port, sum(case.is_pinned for case in cases))

        recreate_table()
        expected = await run_cases(TRANSACTION_CASES, servers.connect, table, stay, stay)
        assert find_unexpected(expected, is_fake=False) == []
        recreate_table()
        assert (
            find_differences(
                expected,
                await run_cases(TRANSACTION_CASES, servers.connect, table, drain_first, undrain_first),
            )
            == []
        )


async def test_begin_rejected_by_read_only_mode_opens_no_transaction(
    tmp_path: Path, cluster: TidbCluster, database: str, global_variables: GlobalVariables
) -> None:
    """A rejected BEGIN leaves no transaction open, so ROLLBACK does not undo the next insert.

    A rejected COMMIT would leave the session in a transaction, so Tidevoy must not send it (decision 0013).
    """
    user = f"u_{database}"
    with connect_directly(cluster.tidb[0]) as admin:
        # Root may write in read-only mode (RESTRICTED_REPLICA_WRITER_ADMIN).
        query_rows(admin, f"create user {user}")
        query_rows(admin, f"grant select, insert on {database}.* to {user}")
        query_rows(admin, f"create table {database}.t (id int primary key)")
    async with run_proxied_servers(tmp_path, cluster) as servers:
        clients = {
            is_draining: await servers.connect(user=user, database=database) for is_draining in (False, True)
        }
        for number, client in enumerate(clients.values()):
            await client.query("begin")
            await client.query(f"insert into t values ({number})")
        answers: dict[bool, list[Answer]] = {is_draining: [] for is_draining in clients}
        for is_draining, client in clients.items():
            if is_draining:
                servers.drain(servers.first)
                await wait_until_greeted(servers.second.port, 1)
            global_variables.set("tidb_super_read_only", 1, servers.first)
            answers[is_draining].append(await client.query("begin"))
            await global_variables.restore()
            answers[is_draining].append(await client.query(f"insert into t values ({10 + is_draining})"))
            answers[is_draining].append(await client.query("rollback"))
        assert answers[True] == answers[False]
        (error,) = answers[False][0]
        assert isinstance(error, ErrorAnswer)
        assert error.code == _READ_ONLY
        await asyncio.gather(*(client.quit() for client in clients.values()))
    with connect_directly(cluster.tidb[0]) as admin:
        assert query_rows(admin, f"select id from {database}.t order by id") == [(10,), (11,)]
        query_rows(admin, f"drop user {user}")

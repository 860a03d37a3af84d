"""The answers to BEGIN are the same with and without a drain of the session's server."""

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
class Fronted:
    """An Envoy in front of two servers, with no control plane."""

    proxy: ModuleEnvoy
    first: Tidb
    second: Tidb
    endpoints: Path

    def drain(self, *drained: Tidb) -> None:
        """Drain these servers, and no others."""
        publish_nodes(self.endpoints, _hosts((self.first, self.second), drained))

    async def wire(
        self, capabilities: Capability = CAPABILITIES, *, user: str = "root", database: str = ""
    ) -> AnswerClient:
        """A client whose answers can be compared."""
        return await AnswerClient.login(
            self.proxy.host, self.proxy.port, capabilities, user=user, database=database
        )


def _hosts(servers: Sequence[Tidb], drained: Sequence[Tidb]) -> list[Host]:
    return [Host(one.address, state="draining" if one in drained else "active") for one in servers]


@asynccontextmanager
async def fronted(directory: Path, cluster: TidbCluster) -> AsyncIterator[Fronted]:
    """Sessions begin at the first server."""
    first, second, *_ = cluster.tidb
    endpoints = directory / "endpoints.json"
    async with run_envoy(
        directory, _hosts((first, second), [second]), ModuleConfig(endpoints=endpoints)
    ) as proxy:
        yield Fronted(proxy, first, second, endpoints)


async def test_texts_that_begin_a_transaction_have_the_same_answers_during_a_drain(
    tmp_path: Path, cluster: TidbCluster, database: str
) -> None:
    table = f"{database}.texts"
    async with fronted(tmp_path, cluster) as servers:

        def empty() -> None:
            with connect_directly(servers.first) as connection:
                query_rows(connection, f"drop table if exists {table}")
                query_rows(connection, f"create table {table} (id int primary key)")

        async def at_first() -> None:
            servers.drain(servers.second)

        async def nothing(_: Sequence[TransactionCase]) -> None:
            pass

        async def drained(cases: Sequence[TransactionCase]) -> None:
            servers.drain(servers.first)
            await wait_until_greeted(servers.second.port, sum(case.is_pinned for case in cases))

        empty()
        expected = await run_cases(TRANSACTION_CASES, servers.wire, table, nothing, at_first)
        assert find_unexpected(expected, is_fake=False) == []
        empty()
        assert (
            find_differences(
                expected, await run_cases(TRANSACTION_CASES, servers.wire, table, drained, at_first)
            )
            == []
        )


async def test_a_begin_that_read_only_mode_refuses_leaves_no_transaction_open(
    tmp_path: Path, cluster: TidbCluster, database: str, global_variables: GlobalVariables
) -> None:
    """If Tidevoy sent a COMMIT instead, ROLLBACK would undo the last row."""
    user = f"u_{database}"
    with connect_directly(cluster.tidb[0]) as admin:
        # Root may write in read-only mode (RESTRICTED_REPLICA_WRITER_ADMIN).
        query_rows(admin, f"create user {user}")
        query_rows(admin, f"grant select, insert on {database}.* to {user}")
        query_rows(admin, f"create table {database}.t (id int primary key)")
    async with fronted(tmp_path, cluster) as servers:
        wires = {leaving: await servers.wire(user=user, database=database) for leaving in (False, True)}
        for number, wire in enumerate(wires.values()):
            await wire.query("begin")
            await wire.query(f"insert into t values ({number})")
        answers: dict[bool, list[Answer]] = {leaving: [] for leaving in wires}
        for leaving, wire in wires.items():
            if leaving:
                servers.drain(servers.first)
                await wait_until_greeted(servers.second.port, 1)
            global_variables.set("tidb_super_read_only", 1, servers.first)
            answers[leaving].append(await wire.query("begin"))
            await global_variables.restore()
            answers[leaving].append(await wire.query(f"insert into t values ({10 + leaving})"))
            answers[leaving].append(await wire.query("rollback"))
        assert answers[True] == answers[False]
        (refused,) = answers[False][0]
        assert isinstance(refused, ErrorAnswer)
        assert refused.code == _READ_ONLY
        await asyncio.gather(*(wire.quit() for wire in wires.values()))
    with connect_directly(cluster.tidb[0]) as admin:
        assert query_rows(admin, f"select id from {database}.t order by id") == [(10,), (11,)]
        query_rows(admin, f"drop user {user}")

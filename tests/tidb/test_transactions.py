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
from tests.support.migration.sql_client import Answer, Failed, Wire
from tests.support.migration.transaction_statements import CASES, Case, all_reach, different, run, unexpected
from tests.support.module.bootstrap import Host, Parts, tell
from tests.support.module.envoy import Envoy, envoy
from tests.support.tidb.global_variables import GlobalVariables
from tests.support.tidb.sessions import direct, rows
from tests.support.tidb_sim_clients import CAPABILITIES

_READ_ONLY = 1836


@dataclass
class Fronted:
    """An Envoy in front of two servers, with no control plane."""

    proxy: Envoy
    first: Tidb
    second: Tidb
    endpoints: Path

    def drain(self, *drained: Tidb) -> None:
        """Drain these servers, and no others."""
        tell(self.endpoints, _hosts((self.first, self.second), drained))

    async def wire(
        self, capabilities: Capability = CAPABILITIES, *, user: str = "root", database: str = ""
    ) -> Wire:
        """A client whose answers can be compared."""
        return await Wire.login(self.proxy.host, self.proxy.port, capabilities, user=user, database=database)


def _hosts(servers: Sequence[Tidb], drained: Sequence[Tidb]) -> list[Host]:
    return [Host(one.address, state="draining" if one in drained else "active") for one in servers]


@asynccontextmanager
async def fronted(directory: Path, cluster: TidbCluster) -> AsyncIterator[Fronted]:
    """Sessions begin at the first server."""
    first, second, *_ = cluster.tidb
    endpoints = directory / "endpoints.json"
    async with envoy(directory, _hosts((first, second), [second]), Parts(endpoints=endpoints)) as proxy:
        yield Fronted(proxy, first, second, endpoints)


async def test_texts_that_begin_a_transaction_have_the_same_answers_during_a_drain(
    tmp_path: Path, cluster: TidbCluster, database: str
) -> None:
    table = f"{database}.texts"
    async with fronted(tmp_path, cluster) as servers:

        def empty() -> None:
            with direct(servers.first) as connection:
                rows(connection, f"drop table if exists {table}")
                rows(connection, f"create table {table} (id int primary key)")

        async def at_first() -> None:
            servers.drain(servers.second)

        async def nothing(_: Sequence[Case]) -> None:
            pass

        async def drained(cases: Sequence[Case]) -> None:
            servers.drain(servers.first)
            await all_reach(servers.second.port, sum(case.is_pinned for case in cases))

        empty()
        expected = await run(CASES, servers.wire, table, nothing, at_first)
        assert unexpected(expected, stand_in=False) == []
        empty()
        assert different(expected, await run(CASES, servers.wire, table, drained, at_first)) == []


async def test_a_begin_that_read_only_mode_refuses_leaves_no_transaction_open(
    tmp_path: Path, cluster: TidbCluster, database: str, global_variables: GlobalVariables
) -> None:
    """If Tidevoy sent a COMMIT instead, ROLLBACK would undo the last row."""
    user = f"u_{database}"
    with direct(cluster.tidb[0]) as admin:
        # Root may write in read-only mode (RESTRICTED_REPLICA_WRITER_ADMIN).
        rows(admin, f"create user {user}")
        rows(admin, f"grant select, insert on {database}.* to {user}")
        rows(admin, f"create table {database}.t (id int primary key)")
    async with fronted(tmp_path, cluster) as servers:
        wires = {leaving: await servers.wire(user=user, database=database) for leaving in (False, True)}
        for number, wire in enumerate(wires.values()):
            await wire.query("begin")
            await wire.query(f"insert into t values ({number})")
        answers: dict[bool, list[Answer]] = {leaving: [] for leaving in wires}
        for leaving, wire in wires.items():
            if leaving:
                servers.drain(servers.first)
                await all_reach(servers.second.port, 1)
            global_variables.set("tidb_super_read_only", 1, servers.first)
            answers[leaving].append(await wire.query("begin"))
            await global_variables.restore()
            answers[leaving].append(await wire.query(f"insert into t values ({10 + leaving})"))
            answers[leaving].append(await wire.query("rollback"))
        assert answers[True] == answers[False]
        (refused,) = answers[False][0]
        assert isinstance(refused, Failed)
        assert refused.code == _READ_ONLY
        await asyncio.gather(*(wire.leave() for wire in wires.values()))
    with direct(cluster.tidb[0]) as admin:
        assert rows(admin, f"select id from {database}.t order by id") == [(10,), (11,)]
        rows(admin, f"drop user {user}")

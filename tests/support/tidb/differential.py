"""Compares sessions that migrate between real TiDB servers with sessions that stay on one server."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from random import Random

from sandbox.local_cluster import LocalCluster, WaitTimeout
from sandbox.tidb import Tidb
from sandbox.tidb_sim.packets import Capability
from tests.support.migration.differential import (
    Activity,
    ComparedSession,
    SessionPair,
    database_names,
    run_activities,
)
from tests.support.migration.sql_client import Answer, AnswerClient, AnswerPart, OkAnswer, RowsAnswer
from tests.support.tidb.node_operations import migration_counts, start_drain
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.tidb_sim_clients import CAPABILITIES

_NOT_NULL = 1
_MINUS_ONE = (1 << 64) - 1
_MAX_DRAIN_SECONDS = 3.0
"""A drain ends after this time, since some sessions cannot leave."""


def recursive_sequence(count: int) -> str:
    """Return a table expression with the numbers from 1 to `count` in the column `seq`."""
    numbers = f"select 1 as seq union all select seq + 1 from numbers where seq < {count}"
    return f"(with recursive numbers as ({numbers}) select seq from numbers order by seq) as sequence"


def without_known_differences(answer: Answer) -> Answer:
    """Return the answer without what a migration may change.

    * The columns' flag NOT_NULL: for a prepared statement, it depends on the parameters of the execution
      whose plan is in the plan cache. This cache is empty after a migration.
    * The affected rows of a command that is no statement, such as COM_PING: TiDB sends those of the last
      statement. After a query these are 0, but the restored session has -1, which is ROW_COUNT().
    """
    parts: list[AnswerPart] = []
    for part in answer:
        match part:
            case RowsAnswer():
                parts.append(replace(part, columns=tuple(map(_nullable, part.columns))))
            case OkAnswer(affected=affected) if affected == _MINUS_ONE:
                parts.append(replace(part, affected=0))
            case _:
                parts.append(part)
    return tuple(parts)


def _nullable(definition: bytes) -> bytes:
    # The definition ends with the flags (2 bytes), the decimals (1) and a filler (2).
    flags = int.from_bytes(definition[-5:-3], "little") & ~_NOT_NULL
    return definition[:-5] + flags.to_bytes(2, "little") + definition[-3:]


@dataclass(frozen=True)
class TidbTrialResult:
    """`statements`: of all migrating sessions. `migrations`: by result and reason."""

    statements: int
    migrations: Mapping[tuple[str, str], int]
    drains: int
    seconds: float
    activities: Counter[str]

    def __str__(self) -> str:
        results = ", ".join(f"{'/'.join(key)} {count}" for key, count in sorted(self.migrations.items()))
        speed = f"{self.statements / self.seconds:.0f}/s"
        return (
            f"{self.statements} statements in {self.seconds:.0f} s ({speed}), {self.drains} drains, "
            f"migrations: {results}; {dict(self.activities)}"
        )


@dataclass(frozen=True)
class TidbTrial:
    """Clients run random activities through Envoy while one node after the other is drained.

    Each client runs the same statements, in a database of its own, in a session directly at `control`.
    `seed` determines the statements, but not when sessions migrate. `statements`: the least number of
    statements of all clients together.
    """

    activities: Mapping[Activity, int]
    statements: int
    clients: int
    seed: int

    async def run(self, stack: LocalCluster, control: Tidb, prefix: str) -> TidbTrialResult:
        """Run the trial in databases whose names start with `prefix`. Raises an ExceptionGroup."""
        started_at, stopped = time.monotonic(), asyncio.Event()
        before = await _migrations(stack)
        with closing(connect_directly(control)) as root:
            for number in range(self.clients):
                for database in _databases(prefix, number):
                    query_rows(root, f"create database {database}")
        async with asyncio.TaskGroup() as group:
            drains = group.create_task(self._keep_draining(stack, stopped))
            clients = [
                group.create_task(self._run_client(stack, control, prefix, number))
                for number in range(self.clients)
            ]
            results = await asyncio.gather(*clients)
            stopped.set()
        migrations = Counter(await _migrations(stack))
        migrations.subtract(before)
        return TidbTrialResult(
            sum(statements for statements, _ in results),
            +migrations,
            drains.result(),
            time.monotonic() - started_at,
            sum((activities for _, activities in results), Counter[str]()),
        )

    async def _run_client(
        self, stack: LocalCluster, control: Tidb, prefix: str, number: int
    ) -> tuple[int, Counter[str]]:
        """Run one client. Return the number of its statements, and its activities."""
        capabilities = CAPABILITIES | Capability.LOCAL_FILES
        capabilities |= Capability.DEPRECATE_EOF if number % 2 else Capability(0)
        migrated_database, control_database = _databases(prefix, number)
        async with (
            _session(stack.sql_port, capabilities, migrated_database) as migrating,
            _session(control.port, capabilities, control_database) as staying,
        ):
            rng = Random(f"{self.seed} {number}")
            pair = SessionPair(migrating, staying, rng, _yield, recursive_sequence, without_known_differences)
            try:
                runs = await run_activities(pair, self.activities, -(-self.statements // self.clients))
            except Exception as error:
                error.add_note(f"seed {self.seed}, client {number}")
                raise
        return pair.statement_count, runs

    async def _keep_draining(self, stack: LocalCluster, stopped: asyncio.Event) -> int:
        """Drain one node after the other until `stopped` is set. Return the number of drains."""
        drains, drained = 0, stack.tidb[0]
        while not stopped.is_set():
            drained = random.choice([node for node in stack.tidb if node is not drained])
            await start_drain(stack, drained)
            drains += 1

            async def is_empty(node: Tidb = drained) -> bool:
                return stopped.is_set() or (await stack.nodes())[node.address]["sessions"] == 0

            with suppress(WaitTimeout):
                await stack.wait_until(is_empty, "an empty node", _MAX_DRAIN_SECONDS)
            (await stack.api.post(f"/v1/nodes/{drained.address}/undrain")).raise_for_status()
        return drains


@asynccontextmanager
async def _session(port: int, capabilities: Capability, database: str) -> AsyncIterator[ComparedSession]:
    client = await AnswerClient.login("127.0.0.1", port, capabilities, database=database)
    try:
        yield ComparedSession(client, database, {})
        await client.quit()
    finally:
        client.writer.transport.abort()


async def _yield() -> None:
    """Give other clients a turn in the middle of a statement."""
    await asyncio.sleep(0)


def _databases(prefix: str, number: int) -> list[str]:
    return [f"{prefix}_{name}" for name in database_names(number)]


async def _migrations(stack: LocalCluster) -> dict[tuple[str, str], int]:
    """Return the number of migrations by result and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for (_, result, reason), count in (await migration_counts(stack)).items():
        counts[result, reason] += count
    return counts

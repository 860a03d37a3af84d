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
from sandbox.tidb_sim.packets import Capability, MySqlCommand
from tests.support.migration.differential import (
    Activity,
    ComparedSession,
    SentCommand,
    SessionPair,
    database_names,
    run_activities,
)
from tests.support.migration.sql_client import Answer, AnswerClient, AnswerPart, OkAnswer, RowsAnswer
from tests.support.tidb.node_operations import migration_counts, start_drain
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.tidb_sim_clients import CAPABILITIES

_NOT_NULL = 1
_MAX_DRAIN_SECONDS = 3.0
"""A drain ends after this time, since some sessions cannot leave."""


def recursive_sequence(count: int) -> str:
    """Return a table expression with the numbers from 1 to `count` in the column `seq`."""
    numbers = f"select 1 as seq union all select seq + 1 from numbers where seq < {count}"
    return f"(with recursive numbers as ({numbers}) select seq from numbers order by seq) as sequence"


def without_known_differences(command: SentCommand, answer: Answer) -> Answer:
    """Return the answer without what a migration may change.

    * The columns' flag NOT_NULL, for an execution of a prepared statement: it depends on the parameters of
      the execution whose plan is in the plan cache. This cache is empty after a migration.
    * The affected rows, insert id and message of a command that is no statement, such as COM_PING: TiDB
      sends those of the last statement. After a query, the affected rows are 0, but the restored session has
      -1, which is ROW_COUNT(). The restored session has no insert id and no message. After a refused export,
      all three are zero.
    """
    is_execution = command.command == MySqlCommand.STMT_EXECUTE or command.body.startswith(b"execute")
    is_statement = command.command in (MySqlCommand.QUERY, MySqlCommand.STMT_EXECUTE)
    parts: list[AnswerPart] = []
    for part in answer:
        match part:
            case RowsAnswer() if is_execution:
                parts.append(replace(part, columns=tuple(map(_nullable, part.columns))))
            case OkAnswer() if not is_statement:
                parts.append(replace(part, affected=0, insert_id=0, info=b""))
            case _:
                parts.append(part)
    return tuple(parts)


def _nullable(definition: bytes) -> bytes:
    # The definition ends with the flags (2 bytes), the decimals (1) and a filler (2).
    flags = int.from_bytes(definition[-5:-3], "little") & ~_NOT_NULL
    return definition[:-5] + flags.to_bytes(2, "little") + definition[-3:]


@dataclass(frozen=True)
class TidbTrialResult:
    """`statements`: how many all migrating sessions ran. `migrations`: counts by result and reason."""

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
    `seed` determines the statements, but not when sessions migrate. `statements`: minimum number of
    statements of all clients together.
    """

    activities: Mapping[Activity, int]
    statements: int
    clients: int
    seed: int

    async def run(self, stack: LocalCluster, control: Tidb, prefix: str) -> TidbTrialResult:
        """Run the trial in databases whose names start with `prefix`. Raises an ExceptionGroup."""
        started_at, drains = time.monotonic(), _Drains(stack, self.clients)
        before = await _migrations(stack)
        with closing(connect_directly(control)) as root:
            for number in range(self.clients):
                for database in _databases(prefix, number):
                    query_rows(root, f"create database {database}")
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(drains.keep_draining())
            clients = [
                group.create_task(self._run_client(stack, control, prefix, number, drains))
                for number in range(self.clients)
            ]
            results = await asyncio.gather(*clients)
            draining.cancel()
        migrations = await _migrations(stack)
        migrations.subtract(before)
        return TidbTrialResult(
            sum(statements for statements, _ in results),
            +migrations,
            drains.count,
            time.monotonic() - started_at,
            sum((activities for _, activities in results), Counter[str]()),
        )

    async def _run_client(
        self, stack: LocalCluster, control: Tidb, prefix: str, number: int, drains: _Drains
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
            pair = SessionPair(
                migrating, staying, rng, drains.wait_next, recursive_sequence, without_known_differences
            )
            try:
                runs = await run_activities(pair, self.activities, -(-self.statements // self.clients))
            except Exception as error:
                error.add_note(f"seed {self.seed}, client {number}")
                raise
        return pair.statement_count, runs


class _Drains:
    """Drains one node after the other."""

    def __init__(self, stack: LocalCluster, clients: int) -> None:
        self._stack = stack
        self._started = asyncio.Event()
        # Waiting clients are in the middle of a statement and cannot migrate, so not all may wait.
        self._waiting_clients = asyncio.Semaphore(clients // 2)
        self.count = 0

    async def keep_draining(self) -> None:
        """Run until the task is cancelled."""
        drained = self._stack.tidb[0]
        while True:
            drained = random.choice([node for node in self._stack.tidb if node is not drained])
            await start_drain(self._stack, drained)
            self.count += 1
            self._started.set()
            self._started = asyncio.Event()

            async def is_empty(node: Tidb = drained) -> bool:
                return bool((await self._stack.nodes())[node.address]["sessions"] == 0)

            with suppress(WaitTimeout):
                await self._stack.wait_until(is_empty, "an empty node", _MAX_DRAIN_SECONDS)
            (await self._stack.api.post(f"/v1/nodes/{drained.address}/undrain")).raise_for_status()

    async def wait_next(self) -> None:
        """Wait until another drain has started, unless too many clients wait already."""
        if not self._waiting_clients.locked():
            async with self._waiting_clients:
                await self._started.wait()


@asynccontextmanager
async def _session(port: int, capabilities: Capability, database: str) -> AsyncIterator[ComparedSession]:
    client = await AnswerClient.login("127.0.0.1", port, capabilities, database=database)
    try:
        yield ComparedSession(client, database, {})
        await client.quit()
    finally:
        client.writer.transport.abort()


def _databases(prefix: str, number: int) -> list[str]:
    return [f"{prefix}_{name}" for name in database_names(number)]


async def _migrations(stack: LocalCluster) -> Counter[tuple[str, str]]:
    """Return the number of migrations by result and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for (_, result, reason), count in (await migration_counts(stack)).items():
        counts[result, reason] += count
    return counts

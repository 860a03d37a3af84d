"""Compares the answers of two sessions that execute the same statements.

One session migrates. The other, the control session, is connected directly to MariaDB or to a TiDB server.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import MAX_PACKET_PAYLOAD, Capability, MySqlCommand, read_lenenc_bytes
from tests.support.migration.fleet import MigratingFleet, mariadb_session
from tests.support.migration.sql_client import (
    Answer,
    AnswerClient,
    AnswerPart,
    ErrorAnswer,
    OkAnswer,
    PrepareAnswer,
    RowsAnswer,
    Value,
    encode_command,
    execute_body,
)
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import wait_until, wait_until_read

SEED_VARIABLE = "TIDEVOY_SEED"
"""The environment variable with the seed of a trial to repeat."""
MIN_DRAIN_SECONDS = 0.05
"""Pause between two drains."""
CUT_COUNTS = (0, 0, 0, 1, 1, 2, 5)
"""Numbers of places at which a request is split. One of them is chosen at random."""
LATE_PROBABILITY, SEPARATE_PROBABILITY = 0.03, 0.3
"""Bounds of a random number drawn after each piece. Below the first bound, the next piece waits until other
sessions have migrated; below the second bound, it waits until the previous piece was read.
"""
ERRORS_WITH_STATEMENT_ID = (1243, 1421)
"""Errors with a statement id in the text: unknown statement, and statement without a cursor."""


class AnswerMismatch(Exception):
    """The migrating session's answer differs from the control session's."""


@dataclass(frozen=True)
class SentCommand:
    """One command. `{db}` in its body is replaced by the session's own database.

    If `statement_name` is set, the body starts with the id of this prepared statement. `compares_types`:
    whether the types of columns must also be equal.
    """

    command: int
    body: bytes = b""
    statement_name: str = ""
    compares_types: bool = True

    def body_for(self, side: ComparedSession) -> bytes:
        body = self.body.replace(b"{db}", side.database.encode())
        return (
            body
            if not self.statement_name
            else struct.pack("<I", side.statement_ids[self.statement_name]) + body[4:]
        )


@dataclass
class ComparedSession:
    """One of the two sessions. `statement_ids`: ids of prepared statements by their names in SessionPair."""

    client: AnswerClient
    database: str
    statement_ids: dict[str, int]


def query_command(statement: str, codec: str = "utf-8") -> SentCommand:
    """Build the command of a statement."""
    return SentCommand(MySqlCommand.QUERY, statement.encode(codec))


def mariadb_sequence(count: int) -> str:
    """Return the table of MariaDB's sequence engine with the numbers from 1 to `count`."""
    return f"mysql.seq_1_to_{count}"


class SessionPair:
    """A migrating session and a control session that execute the same commands.

    `wait_others_migrate` returns when other sessions have arrived at a node or left a node. `sequence`
    returns a table expression with the numbers from 1 to its argument in a column `seq`. `normalize` gets a
    command and its answer, and removes from the answer what may differ between the sessions.
    """

    def __init__(
        self,
        migrating: ComparedSession,
        control: ComparedSession,
        rng: Random,
        wait_others_migrate: Callable[[], Awaitable[None]],
        sequence: Callable[[int], str] = mariadb_sequence,
        normalize: Callable[[SentCommand, Answer], Answer] = lambda command, answer: answer,
    ) -> None:
        self.migrating, self.control, self.rng = migrating, control, rng
        self.sequence = sequence
        self._wait_others_migrate, self._normalize = wait_others_migrate, normalize
        self.statement_count = 0
        self._name_count = 0

    async def send(self, *commands: SentCommand) -> list[Answer]:
        """Send commands to both sessions and compare the answers. Return the migrating session's answers."""
        self.statement_count += len(commands)
        for command in commands:
            self.control.client.writer.write(encode_command(command.command, command.body_for(self.control)))
        await self._send(
            b"".join(
                encode_command(command.command, command.body_for(self.migrating)) for command in commands
            )
        )
        answers = []
        for command in commands:
            answers.append(await self.migrating.client.read_answer(command.command))
            self._compare(command, answers[-1], await self.control.client.read_answer(command.command))
        return answers

    async def run(self, *statements: str, codec: str = "utf-8") -> None:
        """Run statements one by one."""
        for statement in statements:
            await self.send(query_command(statement, codec))

    async def prepare(self, statement: str) -> str:
        """Prepare a statement. Return its name, for `execute`."""
        await self.send(SentCommand(MySqlCommand.STMT_PREPARE, statement.encode()))
        self._name_count += 1
        name = f"s{self._name_count}"
        for side in (self.migrating, self.control):
            side.statement_ids[name] = side.client.statement_id
        return name

    async def execute(self, name: str, *values: Value, types: bool = True, flags: int = 0) -> None:
        await self.send(
            SentCommand(MySqlCommand.STMT_EXECUTE, execute_body(0, values, types=types, flags=flags), name)
        )

    def statement_command(self, command: int, name: str, body: bytes = bytes(4)) -> SentCommand:
        """Build a command for a prepared statement."""
        return SentCommand(command, body, name)

    async def change_user(self) -> None:
        """Change to the same user in the session's own database. Both sessions lose their state."""
        self.statement_count += 1
        for side in (self.migrating, self.control):
            cut = (
                self.rng.randrange(1, 40)
                if side is self.migrating and self.rng.random() < 0.5
                else MAX_PACKET_PAYLOAD
            )
            await side.client.change_user("root", database=side.database, first_piece_bytes=cut)
        self.forget_statements()

    def forget_statements(self) -> None:
        """Forget the prepared statements, which no longer exist."""
        self.migrating.statement_ids.clear()
        self.control.statement_ids.clear()

    async def _send(self, data: bytes) -> None:
        """Send the data to the migrating session, in pieces that end at random places."""
        writer, rng = self.migrating.client.writer, self.rng
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice(CUT_COUNTS)))
        for start, end in pairwise([0, *cuts, len(data)]):
            writer.write(data[start:end])
            await writer.drain()
            if end < len(data):
                # Most pieces may arrive together, some arrive separately, a few arrive only after migrations.
                chance = rng.random()
                if chance < LATE_PROBABILITY:
                    await self._wait_others_migrate()
                elif chance < SEPARATE_PROBABILITY:
                    await wait_until_read(writer)

    def _compare(self, command: SentCommand, answer: Answer, expected: Answer) -> None:
        """Raise AnswerMismatch if more differs than the database name and the statement ids in errors."""
        if answer == expected:
            return
        control_database, migrating_database = (
            self.control.database.encode(),
            self.migrating.database.encode(),
        )
        actual, control = (
            tuple(_with_database(part, control_database, migrating_database) for part in parts)
            for parts in (answer, expected)
        )
        if not command.compares_types:
            actual, control = keep_column_names(actual), keep_column_names(control)
        actual, control = (self._normalize(command, parts) for parts in (actual, control))
        if actual != control:
            difference = f"{answer!r:.1500}\nand not\n{expected!r:.1500}"
            raise AnswerMismatch(f"{command.command}, {command.body[:200]!r}:\n{difference}")


def _with_database(part: AnswerPart, old: bytes, new: bytes) -> AnswerPart:
    """Replace the database name by one of the same length. Drop messages that contain a statement id."""

    def renamed(values: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(value.replace(old, new) for value in values)

    match part:
        case PrepareAnswer():
            return replace(part, columns=renamed(part.columns), parameters=renamed(part.parameters))
        case OkAnswer():
            return replace(part, info=part.info.replace(old, new))
        case ErrorAnswer() if part.message.startswith(b"#HY000ERROR 1243 "):
            return ErrorAnswer(1243, b"")  # TiDB sends this error as an unknown error.
        case ErrorAnswer():
            return replace(
                part,
                message=b"" if part.code in ERRORS_WITH_STATEMENT_ID else part.message.replace(old, new),
            )
        case RowsAnswer():
            return replace(part, columns=renamed(part.columns), rows=renamed(part.rows))
    return part


def keep_column_names(answer: Answer) -> Answer:
    """Return the answer with each column definition reduced to the column's name.

    The simulated TiDB replaces expressions such as ROW_COUNT() by literals, which have other types.
    """
    return tuple(
        replace(part, columns=tuple(map(_column_name, part.columns)))
        if isinstance(part, RowsAnswer)
        else part
        for part in answer
    )


def _column_name(definition: bytes) -> bytes:
    at = 0
    for _ in range(4):  # Catalog, schema, table, table without alias.
        _, at = read_lenenc_bytes(definition, at)
    return read_lenenc_bytes(definition, at)[0]


Activity = Callable[[SessionPair], Awaitable[None]]
PIN_REASONS = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")


async def run_activities(
    pair: SessionPair,
    activities: Mapping[Activity, int],
    statements: int,
    single_activity: Activity | None = None,
) -> Counter[str]:
    """Run random activities until the sessions have executed this many statements each.

    `activities`: weights. `single_activity` runs once, after half of the statements. Return the number of
    runs by name. Raises AnswerMismatch.
    """
    runs: Counter[str] = Counter()
    # Without a cache of numbers in each TiDB server, the numbers do not depend on the server.
    auto_ids = "/*T![auto_id_cache] auto_id_cache 1 */"
    await pair.run(f"create table t (id int auto_increment primary key, v longtext) {auto_ids}")
    while pair.statement_count < statements:
        (activity,) = pair.rng.choices(list(activities), list(activities.values()))
        if single_activity is not None and pair.statement_count > statements / 2:
            activity, single_activity = single_activity, None
        runs[activity.__name__] += 1
        try:
            await activity(pair)
        except Exception as error:
            error.add_note(f"statement {pair.statement_count}, {activity.__name__}")
            raise
    return runs


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial. `migrations`: successful migrations. `activities`: number of runs by activity."""

    statements: int
    migrations: int
    refused: int
    drains: int
    seconds: float
    activities: Counter[str]

    def __str__(self) -> str:
        speed = f"{self.statements / self.seconds:.0f}/s"
        head = f"{self.statements} statements in {self.seconds:.1f} s ({speed})"
        migrations = f"{self.migrations} migrations in {self.drains} drains, {self.refused} refused"
        return f"{head}, {migrations}; {dict(self.activities)}"


@dataclass(frozen=True)
class DifferentialTrial:
    """Clients run random activities while one node after the other is drained.

    `statements`: minimal number of statements of all clients together. `max_drain_seconds`: limit of a drain.
    `seed` determines the statements. One client runs `single_activity` once, in the middle of the trial.
    """

    activities: Mapping[Activity, int]
    single_activity: Activity
    statements: int
    clients: int
    seed: int
    max_drain_seconds: float = 0.5

    async def run(self, nodes: MigratingFleet, mariadb: MariaDb) -> TrialResult:
        """Run the trial. Check that no session remains. Raises an ExceptionGroup if answers differ."""
        await self._warm_up(nodes)
        files, started_at = nodes.proxy.descriptor_count(), time.monotonic()
        before = await nodes.count_migrations("moved", "ok")
        stopped, end = asyncio.Event(), asyncio.Barrier(self.clients + 1)
        waiting_clients = asyncio.Semaphore(self.clients // 2)
        async with client_databases(nodes, mariadb, self.clients), asyncio.TaskGroup() as group:
            drain_task = group.create_task(self._keep_draining(nodes, stopped))
            checks = [
                group.create_task(self._run_client(nodes, mariadb, number, end, waiting_clients))
                for number in range(self.clients)
            ]
            await end.wait()
            seconds = time.monotonic() - started_at
            stopped.set()
            drains = await drain_task
            migrations = await nodes.count_migrations("moved", "ok") - before
            await expect_all_can_migrate(nodes)
            await end.wait()
        await expect_nothing_left(nodes, files)
        results = [check.result() for check in checks]
        activities = sum((counts for _, counts in results), Counter[str]())
        refused = await nodes.count_migrations("stayed", "refused")
        return TrialResult(
            sum(count for count, _ in results), migrations, refused, drains, seconds, activities
        )

    async def _run_client(
        self,
        nodes: MigratingFleet,
        mariadb: MariaDb,
        number: int,
        end: asyncio.Barrier,
        waiting_clients: asyncio.Semaphore,
    ) -> tuple[int, Counter[str]]:
        """Run one client. Return its statement count and activities.

        The client waits at the barrier `end` after its statements, and again before it quits.
        `waiting_clients` limits the clients that wait until other sessions migrate. Waiting clients are in
        the middle of a statement and cannot migrate, so not all clients may wait.
        """

        async def wait_others_migrate() -> None:
            if not waiting_clients.locked():
                async with waiting_clients:
                    await nodes.wait_sessions_changed()

        capabilities = CAPABILITIES | Capability.LOCAL_FILES
        capabilities |= Capability.DEPRECATE_EOF if number % 2 else Capability(0)
        rng = Random(f"{self.seed} {number}")
        migrating_database, control_database = database_names(number)
        per_client = -(-self.statements // self.clients)
        async with mariadb_session(mariadb, capabilities) as control:
            migrating = ComparedSession(
                await nodes.connect_answer_client(capabilities), migrating_database, {}
            )
            pair = SessionPair(
                migrating, ComparedSession(control, control_database, {}), rng, wait_others_migrate
            )
            await pair.run("use {db}")
            single_activity = self.single_activity if number == 0 else None
            try:
                activities = await run_activities(pair, self.activities, per_client, single_activity)
            except Exception as error:
                error.add_note(f"seed {self.seed}, client {number}")
                raise
            await end.wait()
            await end.wait()
            await pair.migrating.client.quit()
        return pair.statement_count, activities

    async def _keep_draining(self, nodes: MigratingFleet, stopped: asyncio.Event) -> int:
        """Drain one node after the other until `stopped` is set. Return the number of drains.

        A drain ends when all sessions have left, or after `max_drain_seconds`: some sessions cannot leave.
        """
        drains = 0
        drained = nodes.nodes[0]
        while not stopped.is_set():
            drained = random.choice([node for node in nodes.nodes if node is not drained])
            nodes.drain(drained)
            drains += 1
            with suppress(TimeoutError):
                await wait_until(
                    lambda node=drained: stopped.is_set() or not node.node.connections,  # type: ignore[misc]
                    self.max_drain_seconds,
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), MIN_DRAIN_SECONDS)
        nodes.drain()
        return drains

    async def _warm_up(self, nodes: MigratingFleet) -> None:
        """Migrate sessions of all workers, so that the workers open all descriptors that they keep."""
        wires = [await nodes.connect_answer_client() for _ in range(4 * self.clients)]
        leaving = sum(nodes.sessions[1:])
        nodes.drain(*nodes.nodes[1:])
        await wait_until(lambda: not any(nodes.sessions[1:]))
        for wire in wires:
            await wire.quit()
        nodes.drain()
        await wait_until(lambda: not any(nodes.sessions))

        async def is_reported() -> bool:
            return await nodes.count_migrations("moved", "ok") >= leaving

        await wait_until(is_reported)


def choose_seed() -> int:
    """Return the seed in `TIDEVOY_SEED`, which repeats a failure, or a new seed. Print the seed."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.randrange(1 << 30))
    print(f"\n{SEED_VARIABLE}={seed}", flush=True)
    return seed


def database_names(number: int) -> tuple[str, str]:
    """Return the databases of a client's migrating session and of its control session.

    The names differ only in the last letter. So an error that quotes a truncated statement contains either
    the whole name or a part that is the same for both databases.
    """
    return f"checked_{number:03}_m", f"checked_{number:03}_s"


@asynccontextmanager
async def client_databases(nodes: MigratingFleet, mariadb: MariaDb, clients: int) -> AsyncIterator[None]:
    """Create the databases of this many clients. At the end, abort all sessions and drop the databases."""
    async with mariadb_session(mariadb) as admin:
        names = [name for number in range(clients) for name in database_names(number)]
        for name in names:
            await admin.query(f"create or replace database {name}")
        try:
            yield
        finally:
            nodes.abort_sessions()
            for name in names:
                await admin.query(f"drop database {name}")


async def expect_all_can_migrate(nodes: MigratingFleet) -> None:
    """Check that every session can still migrate."""
    for node in nodes.nodes:
        nodes.drain(node)
        await wait_until(lambda node=node: not node.node.connections, 40.0)  # type: ignore[misc]
    nodes.drain()


async def expect_nothing_left(nodes: MigratingFleet, files: int) -> None:
    """Check that no sessions or additional descriptors remain, and that no session was lost."""
    await wait_until(lambda: not any(nodes.sessions))
    names = [node.sql_address for node in nodes.nodes]
    await nodes.proxy.wait_no_sessions(*names)
    await nodes.proxy.wait_for_metrics(
        {("sessions_pinned", name, reason): 0 for name in names for reason in PIN_REASONS}
    )
    await wait_until(lambda: nodes.proxy.descriptor_count() <= files)
    assert await nodes.count_migrations("lost", "lost") == 0
    assert nodes.pop_violations() == []

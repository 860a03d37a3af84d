"""Two sessions in which the same is done, one of which moves: their answers must be the same.

The one that stays is MariaDB's own: a direct one, which no stand-in has a part in.
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
"""The environment variable that repeats a trial."""
MIN_DRAIN_SECONDS = 0.05
"""Seconds from one drain to the next, at least."""
CUT_COUNTS = (0, 0, 0, 1, 1, 2, 5)
"""In how many places requests are cut."""
LATE_PROBABILITY, SEPARATE_PROBABILITY = 0.03, 0.3
"""How probable it is that a piece comes when sessions have moved, and that it comes apart at least."""
ERRORS_WITH_STATEMENT_ID = (1243, 1421)
"""Errors whose texts have the number of a statement: unknown, and without a cursor."""


class AnswerMismatch(Exception):
    """Not that of the session that does not move."""


@dataclass(frozen=True)
class SentCommand:
    """One command. `{db}` in its body stands for the session's own database.

    `number`: the name of a prepared statement, whose number its body begins with; `typed`: whether the types
    of columns must be the same, too.
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
    """One of the two sessions. `numbers`: of its prepared statements, by their names here."""

    client: AnswerClient
    database: str
    statement_ids: dict[str, int]


def query_command(statement: str, codec: str = "utf-8") -> SentCommand:
    """A statement."""
    return SentCommand(MySqlCommand.QUERY, statement.encode(codec))


class SessionPair:
    """A session that moves and one that does not, in which the same is done.

    `others_move` returns when other sessions have moved, or have begun to.
    """

    def __init__(
        self,
        migrating: ComparedSession,
        control: ComparedSession,
        rng: Random,
        wait_others_migrate: Callable[[], Awaitable[None]],
    ) -> None:
        self.migrating, self.control, self.rng, self._wait_others_migrate = (
            migrating,
            control,
            rng,
            wait_others_migrate,
        )
        self.statement_count = 0
        self._name_count = 0

    async def send(self, *asked: SentCommand) -> list[Answer]:
        """All of them, sent ahead to both; what the one that moves answers."""
        self.statement_count += len(asked)
        for one in asked:
            self.control.client.writer.write(encode_command(one.command, one.body_for(self.control)))
        await self._send(b"".join(encode_command(one.command, one.body_for(self.migrating)) for one in asked))
        answers = []
        for one in asked:
            answers.append(await self.migrating.client.read_answer(one.command))
            self._compare(one, answers[-1], await self.control.client.read_answer(one.command))
        return answers

    async def run(self, *statements: str, codec: str = "utf-8") -> None:
        """One by one."""
        for statement in statements:
            await self.send(query_command(statement, codec))

    async def prepare(self, statement: str) -> str:
        """Its name here."""
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

    def of_statement(self, command: int, name: str, body: bytes = bytes(4)) -> SentCommand:
        """A command about a prepared statement."""
        return SentCommand(command, body, name)

    async def change_user(self) -> None:
        """To the user that it is, in its own database; both forget everything else."""
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
        """The prepared ones are gone."""
        self.migrating.statement_ids.clear()
        self.control.statement_ids.clear()

    async def _send(self, data: bytes) -> None:
        """In pieces, which do not end where packets end."""
        writer, dice = self.migrating.client.writer, self.rng
        cuts = sorted(dice.randrange(len(data)) for _ in range(dice.choice(CUT_COUNTS)))
        for start, end in pairwise([0, *cuts, len(data)]):
            writer.write(data[start:end])
            await writer.drain()
            if end < len(data):
                # Most may come together; some come apart, and a few so late that sessions move in between.
                late = dice.random()
                if late < LATE_PROBABILITY:
                    await self._wait_others_migrate()
                elif late < SEPARATE_PROBABILITY:
                    await wait_until_read(writer)

    def _compare(self, asked: SentCommand, answer: Answer, expected: Answer) -> None:
        """WrongAnswer. Only the name of the database, and numbers in errors, may differ."""
        if answer == expected:
            return
        control_database, migrating_database = (
            self.control.database.encode(),
            self.migrating.database.encode(),
        )
        wrong, right = (
            tuple(_with_database(part, control_database, migrating_database) for part in parts)
            for parts in (answer, expected)
        )
        if not asked.compares_types:
            wrong, right = without_types(wrong), without_types(right)
        if wrong != right:
            told = f"{answer!r:.1500}\nand not\n{expected!r:.1500}"
            raise AnswerMismatch(f"{asked.command}, {asked.body[:200]!r}:\n{told}")


def _with_database(part: AnswerPart, wrong: bytes, right: bytes) -> AnswerPart:
    """A part of an answer that names another database, which must have as long a name."""

    def renamed(values: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(value.replace(wrong, right) for value in values)

    match part:
        case PrepareAnswer():
            return replace(part, columns=renamed(part.columns), parameters=renamed(part.parameters))
        case OkAnswer():
            return replace(part, info=part.info.replace(wrong, right))
        case ErrorAnswer() if part.message.startswith(b"#HY000ERROR 1243 "):
            return ErrorAnswer(1243, b"")  # TiDB sends this one as an unknown error
        case ErrorAnswer():
            return replace(
                part,
                message=b"" if part.code in ERRORS_WITH_STATEMENT_ID else part.message.replace(wrong, right),
            )
        case RowsAnswer():
            return replace(part, columns=renamed(part.columns), rows=renamed(part.rows))
    return part


def without_types(answer: Answer) -> Answer:
    """The same answer with the names of columns only.

    What the last statement left a stand-in puts into a question as literals, and those have other types.
    """
    return tuple(
        replace(part, columns=tuple(map(_column_name, part.columns)))
        if isinstance(part, RowsAnswer)
        else part
        for part in answer
    )


def _column_name(definition: bytes) -> bytes:
    at = 0
    for _ in range(4):  # catalog, schema, table, table without alias
        _, at = read_lenenc_bytes(definition, at)
    return read_lenenc_bytes(definition, at)[0]


Activity = Callable[[SessionPair], Awaitable[None]]
SESSION_STATES = ("login", "idle", "busy", "transaction", "opaque")
PIN_REASONS = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")


@dataclass(frozen=True)
class TrialResult:
    """What a trial has come to. `moves`: while clients worked; `deeds`: how often each."""

    statements: int
    migrations: int
    refused: int
    drains: int
    seconds: float
    activities: Counter[str]

    def __str__(self) -> str:
        speed = f"{self.statements / self.seconds:.0f}/s"
        told = f"{self.statements} statements in {self.seconds:.1f} s ({speed})"
        return f"{told}, {self.migrations} moves in {self.drains} drains, {self.refused} refused; {dict(self.activities)}"


@dataclass(frozen=True)
class DifferentialTrial:
    """Clients that do things at random while nodes are drained in turn.

    `statements`: of all clients; `turn`: seconds that a drain may take; `seed`: another one gives other
    statements; `once`: done by one client, once, in the middle.
    """

    activities: Mapping[Activity, int]
    single_activity: Activity
    statements: int
    clients: int
    seed: int
    max_drain_seconds: float = 0.5

    async def run(self, nodes: MigratingFleet, mariadb: MariaDb) -> TrialResult:
        """WrongAnswer, in a group. At the end all sessions can move, and nothing is left of them."""
        await self._warm_up(nodes)
        files, began = nodes.proxy.descriptor_count(), time.monotonic()
        before = await nodes.count_migrations("moved", "ok")
        stopped, end = asyncio.Event(), asyncio.Barrier(self.clients + 1)
        waiting = asyncio.Semaphore(self.clients // 2)
        async with client_databases(nodes, mariadb, self.clients), asyncio.TaskGroup() as group:
            mover = group.create_task(self._keep_draining(nodes, stopped))
            checks = [
                group.create_task(self._run_client(nodes, mariadb, number, end, waiting))
                for number in range(self.clients)
            ]
            await end.wait()
            seconds = time.monotonic() - began
            stopped.set()
            drains = await mover
            moves = await nodes.count_migrations("moved", "ok") - before
            await expect_all_can_migrate(nodes)
            await end.wait()
        await expect_nothing_left(nodes, files)
        done = [check.result() for check in checks]
        deeds = sum((deeds for _, deeds in done), Counter[str]())
        refused = await nodes.count_migrations("stayed", "refused")
        return TrialResult(sum(count for count, _ in done), moves, refused, drains, seconds, deeds)

    async def _run_client(
        self,
        nodes: MigratingFleet,
        mariadb: MariaDb,
        number: int,
        end: asyncio.Barrier,
        waiting: asyncio.Semaphore,
    ) -> tuple[int, Counter[str]]:
        """One client: its statements, and how often it did what. It waits twice for the end of all.

        `waiting`: clients that wait for others to move. They are within a statement and cannot move, so not
        all of them may wait.
        """

        async def others_move() -> None:
            if not waiting.locked():
                async with waiting:
                    await nodes.wait_sessions_changed()

        capabilities = CAPABILITIES | Capability.LOCAL_FILES
        capabilities |= Capability.DEPRECATE_EOF if number % 2 else Capability(0)
        dice = Random(f"{self.seed} {number}")
        moving, still = database_names(number)
        each = -(-self.statements // self.clients)
        async with mariadb_session(mariadb, capabilities) as control:
            migrating = ComparedSession(await nodes.connect_answer_client(capabilities), moving, {})
            pair = SessionPair(migrating, ComparedSession(control, still, {}), dice, others_move)
            done: Counter[str] = Counter()
            await pair.run("use {db}")
            await pair.run("create table t (id int auto_increment primary key, v longtext)")
            while pair.statement_count < each:
                (deed,) = dice.choices(list(self.activities), list(self.activities.values()))
                if (
                    number == 0
                    and self.single_activity.__name__ not in done
                    and pair.statement_count > each / 2
                ):
                    deed = self.single_activity
                done[deed.__name__] += 1
                await self._run_activity(deed, pair, number)
            await end.wait()
            await end.wait()
            await pair.migrating.client.quit()
        return pair.statement_count, done

    async def _run_activity(self, activity: Activity, pair: SessionPair, number: int) -> None:
        try:
            await activity(pair)
        except Exception as error:
            error.add_note(
                f"seed {self.seed}, client {number}, statement {pair.statement_count}, {activity.__name__}"
            )
            raise

    async def _keep_draining(self, nodes: MigratingFleet, stopped: asyncio.Event) -> int:
        """Drain one node after the other until all is over; how often that was.

        The next one comes when all sessions have left, or when a turn is over: some cannot leave.
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
        """All workers have had sessions that have moved, so that they have all that they keep."""
        wires = [await nodes.connect_answer_client() for _ in range(4 * self.clients)]
        leaving = sum(nodes.sessions[1:])
        nodes.drain(*nodes.nodes[1:])
        await wait_until(lambda: not any(nodes.sessions[1:]))
        for wire in wires:
            await wire.quit()
        nodes.drain()
        await wait_until(lambda: not any(nodes.sessions))

        async def are_counted() -> bool:
            return await nodes.count_migrations("moved", "ok") >= leaving

        await wait_until(are_counted)


def choose_seed() -> int:
    """A new one, or that of `TIDEVOY_SEED` in the environment, to repeat what has failed; it is printed."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.randrange(1 << 30))
    print(f"\n{SEED_VARIABLE}={seed}", flush=True)
    return seed


def database_names(number: int) -> tuple[str, str]:
    """Of the session of a client that moves, and of the one that does not.

    Their names differ in the last letter alone: errors cite the beginnings of statements, with whole names or
    with parts that are equal.
    """
    return f"checked_{number:03}_m", f"checked_{number:03}_s"


@asynccontextmanager
async def client_databases(nodes: MigratingFleet, mariadb: MariaDb, clients: int) -> AsyncIterator[None]:
    """Those of so many clients, made anew and dropped at the end, when nobody uses them any more."""
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
    """No session is stuck, whatever it has been through."""
    for node in nodes.nodes:
        nodes.drain(node)
        await wait_until(lambda node=node: not node.node.connections, 40.0)  # type: ignore[misc]
    nodes.drain()


async def expect_nothing_left(nodes: MigratingFleet, files: int) -> None:
    """No session, no more descriptors of Envoy than `files`; nobody has broken the protocol or was lost."""
    await wait_until(lambda: not any(nodes.sessions))
    names = [node.sql_address for node in nodes.nodes]
    await nodes.proxy.wait_for_metrics(
        {("sessions", name, state): 0 for name in names for state in SESSION_STATES}
    )
    await nodes.proxy.wait_for_metrics(
        {("sessions_pinned", name, why): 0 for name in names for why in PIN_REASONS}
    )
    await wait_until(lambda: nodes.proxy.descriptor_count() <= files)
    assert await nodes.count_migrations("lost", "lost") == 0
    assert nodes.pop_violations() == []

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
from sandbox.tidb_sim.packets import FULL, Capability, Command, read_lenenc_bytes
from tests.support.migration.fleet import Fleet, unmoved
from tests.support.migration.sql_client import (
    Answer,
    Failed,
    Ok,
    Part,
    Prepared,
    Rows,
    Value,
    Wire,
    executed,
    request,
)
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import taken, until

SEED = "TIDEVOY_SEED"
"""The environment variable that repeats a trial."""
SHORTEST = 0.05
"""Seconds from one drain to the next, at least."""
PIECES = (0, 0, 0, 1, 1, 2, 5)
"""In how many places requests are cut."""
LATE, APART = 0.03, 0.3
"""How probable it is that a piece comes when sessions have moved, and that it comes apart at least."""
NUMBERED = (1243, 1421)
"""Errors whose texts have the number of a statement: unknown, and without a cursor."""


class WrongAnswer(Exception):
    """Not that of the session that does not move."""


@dataclass(frozen=True)
class Asked:
    """One command. `{db}` in its body stands for the session's own database.

    `number`: the name of a prepared statement, whose number its body begins with; `typed`: whether the types
    of columns must be the same, too.
    """

    command: int
    body: bytes = b""
    number: str = ""
    typed: bool = True

    def body_for(self, side: Side) -> bytes:
        body = self.body.replace(b"{db}", side.database.encode())
        return body if not self.number else struct.pack("<I", side.numbers[self.number]) + body[4:]


@dataclass
class Side:
    """One of the two sessions. `numbers`: of its prepared statements, by their names here."""

    wire: Wire
    database: str
    numbers: dict[str, int]


def text(statement: str, codec: str = "utf-8") -> Asked:
    """A statement."""
    return Asked(Command.QUERY, statement.encode(codec))


class Pair:
    """A session that moves and one that does not, in which the same is done.

    `others_move` returns when other sessions have moved, or have begun to.
    """

    def __init__(
        self, moving: Side, still: Side, dice: Random, others_move: Callable[[], Awaitable[None]]
    ) -> None:
        self.moving, self.still, self.dice, self._others_move = moving, still, dice, others_move
        self.statements = 0
        self._names = 0

    async def ask(self, *asked: Asked) -> list[Answer]:
        """All of them, sent ahead to both; what the one that moves answers."""
        self.statements += len(asked)
        for one in asked:
            self.still.wire.writer.write(request(one.command, one.body_for(self.still)))
        await self._send(b"".join(request(one.command, one.body_for(self.moving)) for one in asked))
        answers = []
        for one in asked:
            answers.append(await self.moving.wire.answer(one.command))
            self._compare(one, answers[-1], await self.still.wire.answer(one.command))
        return answers

    async def run(self, *statements: str, codec: str = "utf-8") -> None:
        """One by one."""
        for statement in statements:
            await self.ask(text(statement, codec))

    async def prepare(self, statement: str) -> str:
        """Its name here."""
        await self.ask(Asked(Command.STMT_PREPARE, statement.encode()))
        self._names += 1
        name = f"s{self._names}"
        for side in (self.moving, self.still):
            side.numbers[name] = side.wire.number
        return name

    async def execute(self, name: str, *values: Value, types: bool = True, flags: int = 0) -> None:
        await self.ask(Asked(Command.STMT_EXECUTE, executed(0, values, types=types, flags=flags), name))

    def of_statement(self, command: int, name: str, body: bytes = bytes(4)) -> Asked:
        """A command about a prepared statement."""
        return Asked(command, body, name)

    async def change_user(self) -> None:
        """To the user that it is, in its own database; both forget everything else."""
        self.statements += 1
        for side in (self.moving, self.still):
            cut = self.dice.randrange(1, 40) if side is self.moving and self.dice.random() < 0.5 else FULL
            await side.wire.change_user("root", database=side.database, cut=cut)
        self.forget_statements()

    def forget_statements(self) -> None:
        """The prepared ones are gone."""
        self.moving.numbers.clear()
        self.still.numbers.clear()

    async def _send(self, data: bytes) -> None:
        """In pieces, which do not end where packets end."""
        writer, dice = self.moving.wire.writer, self.dice
        cuts = sorted(dice.randrange(len(data)) for _ in range(dice.choice(PIECES)))
        for start, end in pairwise([0, *cuts, len(data)]):
            writer.write(data[start:end])
            await writer.drain()
            if end < len(data):
                # Most may come together; some come apart, and a few so late that sessions move in between.
                late = dice.random()
                if late < LATE:
                    await self._others_move()
                elif late < APART:
                    await taken(writer)

    def _compare(self, asked: Asked, answer: Answer, expected: Answer) -> None:
        """WrongAnswer. Only the name of the database, and numbers in errors, may differ."""
        if answer == expected:
            return
        there, here = self.still.database.encode(), self.moving.database.encode()
        wrong, right = (tuple(_renamed(part, there, here) for part in parts) for parts in (answer, expected))
        if not asked.typed:
            wrong, right = untyped(wrong), untyped(right)
        if wrong != right:
            told = f"{answer!r:.1500}\nand not\n{expected!r:.1500}"
            raise WrongAnswer(f"{asked.command}, {asked.body[:200]!r}:\n{told}")


def _renamed(part: Part, wrong: bytes, right: bytes) -> Part:
    """A part of an answer that names another database, which must have as long a name."""

    def renamed(values: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(value.replace(wrong, right) for value in values)

    match part:
        case Prepared():
            return replace(part, columns=renamed(part.columns), parameters=renamed(part.parameters))
        case Ok():
            return replace(part, info=part.info.replace(wrong, right))
        case Failed() if part.text.startswith(b"#HY000ERROR 1243 "):
            return Failed(1243, b"")  # TiDB sends this one as an unknown error
        case Failed():
            return replace(part, text=b"" if part.code in NUMBERED else part.text.replace(wrong, right))
        case Rows():
            return replace(part, columns=renamed(part.columns), rows=renamed(part.rows))
    return part


def untyped(answer: Answer) -> Answer:
    """The same answer with the names of columns only.

    What the last statement left a stand-in puts into a question as literals, and those have other types.
    """
    return tuple(
        replace(part, columns=tuple(map(_column_name, part.columns))) if isinstance(part, Rows) else part
        for part in answer
    )


def _column_name(definition: bytes) -> bytes:
    at = 0
    for _ in range(4):  # catalog, schema, table, table without alias
        _, at = read_lenenc_bytes(definition, at)
    return read_lenenc_bytes(definition, at)[0]


Deed = Callable[[Pair], Awaitable[None]]
STATES = ("login", "idle", "busy", "transaction", "opaque")
PINNED = ("transaction", "cursor", "long_data", "opaque", "endless_transactions")


@dataclass(frozen=True)
class Figures:
    """What a trial has come to. `moves`: while clients worked; `deeds`: how often each."""

    statements: int
    moves: int
    refused: int
    drains: int
    seconds: float
    deeds: Counter[str]

    def __str__(self) -> str:
        speed = f"{self.statements / self.seconds:.0f}/s"
        told = f"{self.statements} statements in {self.seconds:.1f} s ({speed})"
        return (
            f"{told}, {self.moves} moves in {self.drains} drains, {self.refused} refused; {dict(self.deeds)}"
        )


@dataclass(frozen=True)
class Trial:
    """Clients that do things at random while nodes are drained in turn.

    `statements`: of all clients; `turn`: seconds that a drain may take; `seed`: another one gives other
    statements; `once`: done by one client, once, in the middle.
    """

    deeds: Mapping[Deed, int]
    once: Deed
    statements: int
    clients: int
    seed: int
    turn: float = 0.5

    async def run(self, nodes: Fleet, mariadb: MariaDb) -> Figures:
        """WrongAnswer, in a group. At the end all sessions can move, and nothing is left of them."""
        await self._warm(nodes)
        files, began = nodes.proxy.descriptors(), time.monotonic()
        before = await nodes.ended("moved", "ok")
        over, end = asyncio.Event(), asyncio.Barrier(self.clients + 1)
        waiting = asyncio.Semaphore(self.clients // 2)
        async with own_databases(nodes, mariadb, self.clients), asyncio.TaskGroup() as group:
            mover = group.create_task(self._keep_moving(nodes, over))
            checks = [
                group.create_task(self._check(nodes, mariadb, number, end, waiting))
                for number in range(self.clients)
            ]
            await end.wait()
            seconds = time.monotonic() - began
            over.set()
            drains = await mover
            moves = await nodes.ended("moved", "ok") - before
            await all_can_move(nodes)
            await end.wait()
        await nothing_is_left(nodes, files)
        done = [check.result() for check in checks]
        deeds = sum((deeds for _, deeds in done), Counter[str]())
        refused = await nodes.ended("stayed", "refused")
        return Figures(sum(count for count, _ in done), moves, refused, drains, seconds, deeds)

    async def _check(
        self, nodes: Fleet, mariadb: MariaDb, number: int, end: asyncio.Barrier, waiting: asyncio.Semaphore
    ) -> tuple[int, Counter[str]]:
        """One client: its statements, and how often it did what. It waits twice for the end of all.

        `waiting`: clients that wait for others to move. They are within a statement and cannot move, so not
        all of them may wait.
        """

        async def others_move() -> None:
            if not waiting.locked():
                async with waiting:
                    await nodes.changed()

        capabilities = CAPABILITIES | Capability.LOCAL_FILES
        capabilities |= Capability.DEPRECATE_EOF if number % 2 else Capability(0)
        dice = Random(f"{self.seed} {number}")
        moving, still = databases(number)
        each = -(-self.statements // self.clients)
        async with unmoved(mariadb, capabilities) as control:
            there = Side(await nodes.wire(capabilities), moving, {})
            pair = Pair(there, Side(control, still, {}), dice, others_move)
            done: Counter[str] = Counter()
            await pair.run("use {db}")
            await pair.run("create table t (id int auto_increment primary key, v longtext)")
            while pair.statements < each:
                (deed,) = dice.choices(list(self.deeds), list(self.deeds.values()))
                if number == 0 and self.once.__name__ not in done and pair.statements > each / 2:
                    deed = self.once
                done[deed.__name__] += 1
                await self._do(deed, pair, number)
            await end.wait()
            await end.wait()
            await pair.moving.wire.leave()
        return pair.statements, done

    async def _do(self, deed: Deed, pair: Pair, number: int) -> None:
        try:
            await deed(pair)
        except Exception as error:
            error.add_note(f"seed {self.seed}, client {number}, statement {pair.statements}, {deed.__name__}")
            raise

    async def _keep_moving(self, nodes: Fleet, over: asyncio.Event) -> int:
        """Drain one node after the other until all is over; how often that was.

        The next one comes when all sessions have left, or when a turn is over: some cannot leave.
        """
        turns = 0
        drained = nodes.nodes[0]
        while not over.is_set():
            drained = random.choice([node for node in nodes.nodes if node is not drained])
            nodes.drain(drained)
            turns += 1
            with suppress(TimeoutError):
                await until(lambda node=drained: over.is_set() or not node.node.connections, self.turn)  # type: ignore[misc]
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), SHORTEST)
        nodes.drain()
        return turns

    async def _warm(self, nodes: Fleet) -> None:
        """All workers have had sessions that have moved, so that they have all that they keep."""
        wires = [await nodes.wire() for _ in range(4 * self.clients)]
        leaving = sum(nodes.sessions[1:])
        nodes.drain(*nodes.nodes[1:])
        await until(lambda: not any(nodes.sessions[1:]))
        for wire in wires:
            await wire.leave()
        nodes.drain()
        await until(lambda: not any(nodes.sessions))

        async def are_counted() -> bool:
            return await nodes.ended("moved", "ok") >= leaving

        await until(are_counted)


def a_seed() -> int:
    """A new one, or that of `TIDEVOY_SEED` in the environment, to repeat what has failed; it is printed."""
    seed = int(os.environ.get(SEED) or random.randrange(1 << 30))
    print(f"\n{SEED}={seed}", flush=True)
    return seed


def databases(number: int) -> tuple[str, str]:
    """Of the session of a client that moves, and of the one that does not.

    Their names differ in the last letter alone: errors cite the beginnings of statements, with whole names or
    with parts that are equal.
    """
    return f"checked_{number:03}_m", f"checked_{number:03}_s"


@asynccontextmanager
async def own_databases(nodes: Fleet, mariadb: MariaDb, clients: int) -> AsyncIterator[None]:
    """Those of so many clients, made anew and dropped at the end, when nobody uses them any more."""
    async with unmoved(mariadb) as admin:
        names = [name for number in range(clients) for name in databases(number)]
        for name in names:
            await admin.query(f"create or replace database {name}")
        try:
            yield
        finally:
            nodes.cut()
            for name in names:
                await admin.query(f"drop database {name}")


async def all_can_move(nodes: Fleet) -> None:
    """No session is stuck, whatever it has been through."""
    for node in nodes.nodes:
        nodes.drain(node)
        await until(lambda node=node: not node.node.connections, 40.0)  # type: ignore[misc]
    nodes.drain()


async def nothing_is_left(nodes: Fleet, files: int) -> None:
    """No session, no more descriptors of Envoy than `files`; nobody has broken the protocol or was lost."""
    await until(lambda: not any(nodes.sessions))
    names = [node.sql_address for node in nodes.nodes]
    await nodes.proxy.reports({("sessions", name, state): 0 for name in names for state in STATES})
    await nodes.proxy.reports({("sessions_pinned", name, why): 0 for name in names for why in PINNED})
    await until(lambda: nodes.proxy.descriptors() <= files)
    assert await nodes.ended("lost", "lost") == 0
    assert nodes.take_violations() == []

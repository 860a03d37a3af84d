"""Texts that begin a transaction, or look as if they did, and the answers to them in many situations.

Each text is executed in sessions of its own, with and without a drain of the server. The answers of both
runs must be equal.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from sandbox.tidb_sim.packets import Capability, Command
from tests.support.migration.sql_client import Answer, Failed, Prepared, Wire, executed
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import until

BATCH = 16
"""Parallel sessions: as many busy sessions of a node may wait for a move at the same time."""
_SYNTAX, _NOOP, _ONE_STATEMENT, _BAD_TIME = 1064, 1235, 8130, 1292
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_INFO, _WITH_INFO, _ESTABLISHED = 2, 1 << 1, 1 << 1
_ONE = CAPABILITIES & ~Capability.MULTI_STATEMENTS
_SEVERAL = CAPABILITIES | Capability.MULTI_STATEMENTS


@dataclass(frozen=True)
class Text:
    """`{id}` stands for a unique number. `code`: the error of TiDB 8.5.3; 0: success.

    `like_tidb`: whether the stand-in, which has MariaDB's lexer, answers the same.
    """

    text: str
    code: int = 0
    capabilities: Capability = _ONE
    like_tidb: bool = True


TEXTS = (
    *(
        Text(text)
        for text in (
            *("BEGIN", "begin;", "BeGiN ;", "  \t\r\nbegin  ", "begin\n;\n", "begin\0", "begin\x0c"),
            *("BEGIN OPTIMISTIC", "begin optimistic ;", "BEGIN PESSIMISTIC", "begin\tPessimistic;"),
            *("START TRANSACTION", "start\ttransaction;", "Start \n Transaction \n"),
            "START TRANSACTION WITH CONSISTENT SNAPSHOT",
            "start transaction  with\nconsistent snapshot ;",
            "START TRANSACTION WITH CAUSAL CONSISTENCY ONLY",
            "START TRANSACTION READ WRITE",
            *("/* a */ begin", "begin /* a */", "-- a\nbegin", "# a\nbegin", "begin -- a", "begin # a"),
            *(
                "/*! begin */",
                "/*!40100 start transaction with consistent snapshot */",
                "start/**/transaction",
            ),
            *("commit", "rollback", "select 1", "savepoint a", "begin;;"),
        )
    ),
    Text("; begin", like_tidb=False),
    Text("/*T! begin */", like_tidb=False),
    Text("/*T![unknown] begin */", like_tidb=False),
    *(
        Text(text, _SYNTAX)
        for text in (
            *("BEGIN foo", "BEGIN WORK", "BEGIN TRANSACTION", "BEGIN OPTIMISTIC PESSIMISTIC", "begin foo;"),
            *("begin optimisticc", "BEGIN PESSIMISTIC WITH CONSISTENT SNAPSHOT", "begin not atomic select 1"),
            *(
                "START",
                "START foo",
                "START TRANSACTION foo",
                "START TRANSACTION PESSIMISTIC",
                "STARTTRANSACTION",
            ),
            "START TRANSACTION READ ONLY, WITH CONSISTENT SNAPSHOT",
            "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ WRITE",
            *("START TRANSACTION WITH CONSISTENT", "START TRANSACTION READ"),
            *("begin_", "beginning", "begin1", "`begin`", "begin()", "begin,", "begin 1", "begin@a"),
            *("/* a */ begin foo", "begin /*! foo */", "begin; foo", "begin; begin foo"),
        )
    ),
    Text("begin\u00a0", _SYNTAX),
    Text("START TRANSACTION READ ONLY", _NOOP),
    Text("start transaction read only;", _NOOP),
    Text("/* a */ start transaction /*! read only */", _NOOP),
    Text("START TRANSACTION READ ONLY AS OF TIMESTAMP 'x'", _BAD_TIME, like_tidb=False),
    *(
        Text(text, _ONE_STATEMENT, like_tidb=False)
        for text in ("begin; select 1", "begin; insert into {table} values ({id})", "commit; begin")
    ),
    *(
        Text(text, capabilities=_SEVERAL)
        for text in (
            *("begin", "begin; select 1", "begin; insert into {table} values ({id})", "begin; begin"),
            *("begin; rollback", "commit; begin", "select 1; begin", "/* a; b */ begin; select 1"),
        )
    ),
    *(Text(text, _SYNTAX, _SEVERAL) for text in ("begin; foo", "commit; begin foo", "begin foo; commit")),
)


class Where(Enum):
    """The statements before the text."""

    IN_TRANSACTION = ("begin", "insert into {table} values ({id})")
    WITHOUT_AUTOCOMMIT = ("set autocommit = 0", "insert into {table} values ({id})")
    OUTSIDE = ("insert into {table} values ({id})",)
    OUTSIDE_WITHOUT_AUTOCOMMIT = ("set autocommit = 0",)


@dataclass(frozen=True)
class Case:
    """One session. `number` is unique. `prepared`: the text is sent in the binary protocol."""

    number: int
    text: Text
    where: Where
    prepared: bool

    @property
    def is_pinned(self) -> bool:
        """Whether an open transaction keeps it from moving before the text."""
        return self.where in (Where.IN_TRANSACTION, Where.WITHOUT_AUTOCOMMIT)

    async def prepare(self, wire: Wire, table: str) -> list[Answer]:
        """Execute the statements before the text."""
        return [await wire.query(self._filled(text, table, 0)) for text in self.where.value]

    async def ask(self, wire: Wire, table: str) -> list[Answer]:
        """Execute the text, and statements that show which transactions are open or committed."""
        answers = await self._execute(wire, self._filled(self.text.text, table, 1))
        for text in (
            "show warnings",
            "insert into {table} values ({id})",
            "rollback",
            f"select id from {{table}} where id div 10 = {self.number} order by id",
        ):
            answers.append(await wire.query(self._filled(text, table, 2)))
        return answers

    async def _execute(self, wire: Wire, text: str) -> list[Answer]:
        if not self.prepared:
            return [await wire.query(text)]
        prepared = await wire.ask(Command.STMT_PREPARE, text.encode())
        if not isinstance(prepared[0], Prepared):
            return [prepared]
        return [prepared, await wire.ask(Command.STMT_EXECUTE, executed(wire.number, ()))]

    def _filled(self, text: str, table: str, offset: int) -> str:
        return text.replace("{table}", table).replace("{id}", str(10 * self.number + offset))


CASES = tuple(
    Case(number, text, where, prepared)
    for number, (text, where, prepared) in enumerate(
        (text, where, prepared)
        for where in Where
        for prepared in (False, True)
        for text in TEXTS
        # One situation is enough for the binary protocol.
        if not prepared or where is Where.IN_TRANSACTION
    )
)

Login = Callable[[Capability], Awaitable[Wire]]


async def run(
    cases: Sequence[Case],
    login: Login,
    table: str,
    between: Callable[[Sequence[Case]], Awaitable[None]],
    before: Callable[[], Awaitable[None]],
) -> dict[Case, list[Answer]]:
    """The answers to each case. `before` runs before each batch, `between` before the texts of a batch."""
    answers: dict[Case, list[Answer]] = {}
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        await before()
        wires = [await login(case.text.capabilities) for case in batch]
        first = [await case.prepare(wire, table) for case, wire in zip(batch, wires, strict=True)]
        await between(batch)
        asked = await asyncio.gather(
            *(case.ask(wire, table) for case, wire in zip(batch, wires, strict=True)),
        )
        for case, one, rest in zip(batch, first, asked, strict=True):
            answers[case] = one + rest
        await asyncio.gather(*(wire.leave() for wire in wires))
    return answers


def different(
    left: dict[Case, list[Answer]],
    right: dict[Case, list[Answer]],
    compared: Callable[[Answer], Answer] = lambda answer: answer,
) -> list[str]:
    """The cases whose answers differ. `compared`: the part of an answer that is compared."""
    return [
        f"{case.text.text!r} {case.where.name} prepared={case.prepared}: {left[case]} but {right[case]}"
        for case in left
        if [*map(compared, left[case])] != [*map(compared, right[case])]
    ]


def unexpected(answers: dict[Case, list[Answer]], *, stand_in: bool) -> list[str]:
    """Answers to texts with another code than TiDB's."""
    found = []
    for case, received in answers.items():
        # Four statements follow the text.
        part = received[-5][-1]
        code = part.code if isinstance(part, Failed) else 0
        applies = case.text.like_tidb or not stand_in
        if applies and not case.prepared and code != case.text.code:
            found.append(f"{case.text.text!r} {case.where.name}: {part}")
    return found


def greeted(port: int) -> int:
    """How many clients in this namespace have read the greeting of a server at that port, and sent nothing.

    The kernel reports it for each socket (sock_diag(7)), as for `ss --info`.
    """
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, _WITH_INFO, _ESTABLISHED) + bytes(48)
    count = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            messages = kernel.recv(1 << 20)
            while messages:
                length, kind = struct.unpack_from("=IH", messages)
                if kind != _BY_FAMILY:
                    return count
                count += _has_read_a_greeting(messages[16:length], port)
                messages = messages[(length + 3) & ~3 :]


def _has_read_a_greeting(socket_: bytes, port: int) -> bool:
    (peer,), (unread,) = struct.unpack_from("!H", socket_, 6), struct.unpack_from("=I", socket_, 56)
    attributes = socket_[72:]
    while attributes:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _INFO:
            sent, received = struct.unpack_from("=QQ", attributes, 4 + 120)
            return bool(peer == port and unread == 0 and received > 0 and sent <= 1)  # `sent` counts the SYN
        attributes = attributes[(length + 3) & ~3 :]
    return False


async def all_reach(port: int, count: int) -> None:
    """Returns when the connections of this many waiting moves have been greeted by the target at `port`."""
    await until(lambda: greeted(port) >= count)

"""Texts that start a transaction or look similar, and the answers to them in many contexts.

Each text is executed in separate sessions, with and without a drain of the server. The answers of both
runs must be equal.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from sandbox.tidb_sim.packets import Capability, MySqlCommand
from tests.support.migration.sql_client import Answer, AnswerClient, ErrorAnswer, PrepareAnswer, execute_body
from tests.support.tidb_sim_clients import CAPABILITIES
from tests.support.waiting import wait_until

BATCH_SIZE = 16
"""Parallel sessions. No more busy sessions of a node may wait for a migration at the same time."""
_SYNTAX, _NOOP, _ONE_STATEMENT, _BAD_TIME = 1064, 1235, 8130, 1292
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_INFO, _WITH_INFO, _ESTABLISHED = 2, 1 << 1, 1 << 1
_SINGLE_STATEMENT = CAPABILITIES & ~Capability.MULTI_STATEMENTS
_MULTI_STATEMENTS = CAPABILITIES | Capability.MULTI_STATEMENTS


@dataclass(frozen=True)
class TransactionText:
    """`{id}` in `text` is replaced by a unique number. `code`: the error code of TiDB 8.5.3, 0 for success.

    `simulator_answers_like_tidb`: whether the simulated server, which has MariaDB's lexer, answers like TiDB.
    """

    text: str
    code: int = 0
    capabilities: Capability = _SINGLE_STATEMENT
    simulator_answers_like_tidb: bool = True


TRANSACTION_TEXTS = (
    *(
        TransactionText(text)
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
    TransactionText("; begin", simulator_answers_like_tidb=False),
    TransactionText("/*T! begin */", simulator_answers_like_tidb=False),
    TransactionText("/*T![unknown] begin */", simulator_answers_like_tidb=False),
    *(
        TransactionText(text, _SYNTAX)
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
    TransactionText("begin\u00a0", _SYNTAX),
    TransactionText("START TRANSACTION READ ONLY", _NOOP),
    TransactionText("start transaction read only;", _NOOP),
    TransactionText("/* a */ start transaction /*! read only */", _NOOP),
    TransactionText(
        "START TRANSACTION READ ONLY AS OF TIMESTAMP 'x'", _BAD_TIME, simulator_answers_like_tidb=False
    ),
    *(
        TransactionText(text, _ONE_STATEMENT, simulator_answers_like_tidb=False)
        for text in ("begin; select 1", "begin; insert into {table} values ({id})", "commit; begin")
    ),
    *(
        TransactionText(text, capabilities=_MULTI_STATEMENTS)
        for text in (
            *("begin", "begin; select 1", "begin; insert into {table} values ({id})", "begin; begin"),
            *("begin; rollback", "commit; begin", "select 1; begin", "/* a; b */ begin; select 1"),
        )
    ),
    *(
        TransactionText(text, _SYNTAX, _MULTI_STATEMENTS)
        for text in ("begin; foo", "commit; begin foo", "begin foo; commit")
    ),
)


class TransactionContext(Enum):
    """The statements before the text."""

    IN_TRANSACTION = ("begin", "insert into {table} values ({id})")
    WITHOUT_AUTOCOMMIT = ("set autocommit = 0", "insert into {table} values ({id})")
    NO_TRANSACTION = ("insert into {table} values ({id})",)
    NO_TRANSACTION_WITHOUT_AUTOCOMMIT = ("set autocommit = 0",)


@dataclass(frozen=True)
class TransactionCase:
    """One session. `number` is unique. `is_prepared`: the text is sent in the binary protocol."""

    number: int
    text: TransactionText
    context: TransactionContext
    is_prepared: bool

    @property
    def is_pinned(self) -> bool:
        """Whether the statements before the text leave a transaction open, which prevents a migration."""
        return self.context in (TransactionContext.IN_TRANSACTION, TransactionContext.WITHOUT_AUTOCOMMIT)

    async def run_context(self, wire: AnswerClient, table: str) -> list[Answer]:
        """Execute the statements before the text."""
        return [await wire.query(self._expand(text, table, 0)) for text in self.context.value]

    async def run_text(self, wire: AnswerClient, table: str) -> list[Answer]:
        """Execute the text, and statements that show which transactions are open or committed."""
        answers = await self._execute(wire, self._expand(self.text.text, table, 1))
        for text in (
            "show warnings",
            "insert into {table} values ({id})",
            "rollback",
            f"select id from {{table}} where id div 10 = {self.number} order by id",
        ):
            answers.append(await wire.query(self._expand(text, table, 2)))
        return answers

    async def _execute(self, wire: AnswerClient, text: str) -> list[Answer]:
        if not self.is_prepared:
            return [await wire.query(text)]
        prepared = await wire.send_command(MySqlCommand.STMT_PREPARE, text.encode())
        if not isinstance(prepared[0], PrepareAnswer):
            return [prepared]
        return [
            prepared,
            await wire.send_command(MySqlCommand.STMT_EXECUTE, execute_body(wire.statement_id, ())),
        ]

    def _expand(self, text: str, table: str, offset: int) -> str:
        return text.replace("{table}", table).replace("{id}", str(10 * self.number + offset))


TRANSACTION_CASES = tuple(
    TransactionCase(number, text, where, prepared)
    for number, (text, where, prepared) in enumerate(
        (text, where, prepared)
        for where in TransactionContext
        for prepared in (False, True)
        for text in TRANSACTION_TEXTS
        # The binary protocol is tested in one context only.
        if not prepared or where is TransactionContext.IN_TRANSACTION
    )
)

ConnectClient = Callable[[Capability], Awaitable[AnswerClient]]


async def run_cases(
    cases: Sequence[TransactionCase],
    login: ConnectClient,
    table: str,
    before_texts: Callable[[Sequence[TransactionCase]], Awaitable[None]],
    after_batch: Callable[[], Awaitable[None]],
) -> dict[TransactionCase, list[Answer]]:
    """Return the answers to each case.

    `before_texts` runs between the contexts and the texts of a batch, `after_batch` after its clients left.
    """
    answers: dict[TransactionCase, list[Answer]] = {}
    for start in range(0, len(cases), BATCH_SIZE):
        batch = cases[start : start + BATCH_SIZE]
        with ExitStack() as open_clients:
            clients = []
            for case in batch:
                clients.append(await login(case.text.capabilities))
                open_clients.callback(clients[-1].writer.close)
            first = [
                await case.run_context(client, table) for case, client in zip(batch, clients, strict=True)
            ]
            await before_texts(batch)
            text_answers = await asyncio.gather(
                *(case.run_text(client, table) for case, client in zip(batch, clients, strict=True)),
            )
            for case, context_answers, text_part in zip(batch, first, text_answers, strict=True):
                answers[case] = context_answers + text_part
            await asyncio.gather(*(client.quit() for client in clients))
        await after_batch()
    return answers


def find_differences(
    left: dict[TransactionCase, list[Answer]],
    right: dict[TransactionCase, list[Answer]],
    compared: Callable[[Answer], Answer] = lambda answer: answer,
) -> list[str]:
    """Return the cases whose answers differ. `compared` returns the compared part of an answer."""
    return [
        f"{case.text.text!r} {case.context.name} prepared={case.is_prepared}: {left[case]} but {right[case]}"
        for case in left
        if [*map(compared, left[case])] != [*map(compared, right[case])]
    ]


def find_unexpected(answers: dict[TransactionCase, list[Answer]], *, is_fake: bool) -> list[str]:
    """Return descriptions of the answers whose error code differs from TiDB's."""
    unexpected = []
    for case, received in answers.items():
        # `run_text` executes four statements after the text.
        part = received[-5][-1]
        code = part.code if isinstance(part, ErrorAnswer) else 0
        applies = case.text.simulator_answers_like_tidb or not is_fake
        if applies and not case.is_prepared and code != case.text.code:
            unexpected.append(f"{case.text.text!r} {case.context.name}: {part}")
    return unexpected


def count_greeted_clients(port: int) -> int:
    """Return how many clients have read the greeting of the server at `port` and have sent nothing.

    The kernel reports this for each socket of this network namespace (sock_diag(7)), as for `ss --info`.
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
                count += _has_read_greeting(messages[16:length], port)
                messages = messages[(length + 3) & ~3 :]


def _has_read_greeting(socket_: bytes, port: int) -> bool:
    (peer,), (unread,) = struct.unpack_from("!H", socket_, 6), struct.unpack_from("=I", socket_, 56)
    attributes = socket_[72:]
    while attributes:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _INFO:
            sent, received = struct.unpack_from("=QQ", attributes, 4 + 120)
            return bool(peer == port and unread == 0 and received > 0 and sent <= 1)  # `sent` counts the SYN.
        attributes = attributes[(length + 3) & ~3 :]
    return False


async def wait_until_greeted(port: int, count: int) -> None:
    """Wait until `count` waiting migrations have received the greeting of the server at `port`."""
    await wait_until(lambda: count_greeted_clients(port) >= count)

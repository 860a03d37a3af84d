"""Asking MariaDB for the states of a session, which disturbs what the last statement has left behind.

MariaDB: information_schema.SYSTEM_VARIABLES and .USER_VARIABLES. All values that may be in any character set
are asked for in hexadecimal; each SELECT has a LIMIT, for without one `sql_select_limit` counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Self, TypeVar

from sandbox.tidb_sim.charsets import guessed
from sandbox.tidb_sim.mariadb_backend import Backing, BackingRefused
from sandbox.tidb_sim.packets import err
from sandbox.tidb_sim.prepared_statements import Statement
from sandbox.tidb_sim.session_states import PreparedText, UserVariable, Warned
from sandbox.tidb_sim.stream import ConnectionClosed

_T = TypeVar("_T")
_ALWAYS = (
    "sql_mode",
    "character_set_client",
    "character_set_results",
    "character_set_connection",
    "collation_connection",
    "autocommit",
    "time_zone",
    "tx_isolation",
    # Without these RAND() would begin anew.
    "rand_seed1",
    "rand_seed2",
    "timestamp",
)
_NEVER = (
    # They come from the current database.
    "character_set_database",
    "collation_database",
    # No session can set them.
    "max_allowed_packet",
    "net_buffer_length",
)
_AT_ONCE = 500
"""User variables that one SELECT reads."""
_MOMENT = (
    "ROW_COUNT()",
    "FOUND_ROWS()",
    "LAST_INSERT_ID()",
    "@@in_transaction",
    "DATABASE()",
    "@@character_set_client",
    "@@character_set_results",
    "@@sql_mode",
    "@@timestamp",
)
_LONGEST_LOCK = 64
"""Characters of a lock's name."""


@dataclass(frozen=True)
class Moment:
    """What must be asked first. `results`: None when answers are not converted; `modes`: of `sql_mode`."""

    row_count: int
    found_rows: int
    last_insert_id: int
    in_transaction: bool
    database: str
    client: str
    results: str | None
    modes: frozenset[str]
    time: str
    """Seconds since 1970, to a millionth."""

    @classmethod
    async def of(cls, backing: Backing) -> Self:
        """Ask for it. No table is used, so that the warnings stay. BackingRefused, or ConnectionClosed."""
        asked = ", ".join(f"HEX(CONVERT({expression} USING utf8mb4))" for expression in _MOMENT)
        (row,) = await backing.rows(f"SELECT {asked} LIMIT 1")
        told = [None if cell is None else unhexed(cell).decode() for cell in row]
        return cls(
            row_count=int(told[0] or 0),
            found_rows=int(told[1] or 0),
            last_insert_id=int(told[2] or 0),
            in_transaction=told[3] in ("1", "ON"),
            database=told[4] or "",
            client=told[5] or "utf8mb4",
            results=told[6] or None,
            modes=frozenset((told[7] or "").upper().split(",")),
            time=told[8] or "",
        )


def unhexed(cell: bytes) -> bytes:
    """The bytes of a value in hexadecimal, also from a session that wants its answers in UCS-2 or so."""
    return bytes.fromhex(cell.replace(b"\0", b"").decode())


def set_charsets(client: str, results: str | None) -> str:
    """The statement that sets in which character sets statements come and answers go."""
    return f"SET character_set_client = {client}, character_set_results = {results or 'NULL'}"


@asynccontextmanager
async def in_utf8(backing: Backing, moment: Moment) -> AsyncIterator[None]:
    """Meanwhile both are UTF-8. BackingRefused, or ConnectionClosed."""
    await backing.execute(set_charsets("utf8mb4", "utf8mb4"))
    try:
        yield
    finally:
        await give_back(backing, set_charsets(moment.client, moment.results))


async def give_back(backing: Backing, statement: str) -> None:
    """Execute what makes the session the client's again: KILL QUERY may hit it. ConnectionClosed."""
    try:
        await backing.execute(statement)
    except BackingRefused:
        try:
            await backing.execute(statement)
        except BackingRefused as refusal:
            raise ConnectionClosed from refusal  # rather no session than another one


async def held_locks(backing: Backing, names: Iterable[bytes], moment: Moment) -> set[bytes]:
    """Those of the locks of these names that the session holds. BackingRefused, or ConnectionClosed."""
    texts = {name: guessed(name, moment.client) for name in names}
    asked = [name for name, text in texts.items() if 0 < len(text) <= _LONGEST_LOCK]
    held: set[bytes] = set()
    for some in _batched(asked, _AT_ONCE):
        parts = (f"IS_USED_LOCK(CONVERT(x'{texts[name].encode().hex()}' USING utf8mb4))" for name in some)
        listed = ", ".join(f"HEX({part} <=> CONNECTION_ID())" for part in parts)
        (row,) = await backing.rows(f"SELECT {listed} LIMIT 1")
        held |= {name for name, cell in zip(some, row, strict=True) if b"1" in (cell or b"")}
    return held


async def warnings(backing: Backing) -> tuple[Warned, ...]:
    """What SHOW WARNINGS tells; no statement that uses a table may come before. In UTF-8."""
    rows = await backing.rows("SHOW WARNINGS")
    return tuple(Warned(_text(level), int(code or 0), _text(message)) for level, code, message in rows)


async def system_variables(backing: Backing, moment: Moment) -> dict[str, str]:
    """Those that a session can set and that are unlike in a new session, and a few more. In UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, SESSION_VALUE FROM information_schema.SYSTEM_VARIABLES "
        f"WHERE VARIABLE_NAME IN ({_listed(_ALWAYS)}) OR READ_ONLY = 'NO' "
        "AND SESSION_VALUE IS NOT NULL AND GLOBAL_VALUE IS NOT NULL "
        "AND BINARY SESSION_VALUE <> BINARY GLOBAL_VALUE "
        f"AND VARIABLE_NAME NOT IN ({_listed(_NEVER)}) LIMIT 10000"
    )
    found = {_text(name).lower(): _text(value) for name, value in rows}
    if Decimal(found["timestamp"]) != Decimal(moment.time):
        del found["timestamp"]  # it goes with the clock: nobody has set it
    # Those two are others just now.
    charsets = {"character_set_client": moment.client, "character_set_results": moment.results or ""}
    return found | charsets


async def user_variables(backing: Backing) -> dict[str, UserVariable]:
    """All of them. In UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, VARIABLE_TYPE FROM information_schema.USER_VARIABLES LIMIT 1000000"
    )
    kinds = {_text(name): _text(kind).upper() for name, kind in rows}
    found: dict[str, UserVariable] = {}
    for some in _batched(kinds, _AT_ONCE):
        asked = ", ".join(_asked(name, kinds[name]) for name in some)
        (values,) = await backing.rows(f"SELECT {asked} LIMIT 1")
        for number, name in enumerate(some):
            value, collation, null = values[3 * number : 3 * number + 3]
            if value is None and null == b"0":
                raise BackingRefused(err(1301, f"@{name} is larger than half of max_allowed_packet", "HY000"))
            kind = f"VARCHAR {_text(collation)}" if kinds[name] == "VARCHAR" else kinds[name]
            found[name] = UserVariable(kind, None if value is None else unhexed(value))
    return found


def prepared_text(statement: Statement, moment: Moment) -> PreparedText:
    """A statement as it is told."""
    text = guessed(statement.text, moment.client)
    return PreparedText(text, statement.database, statement.name, statement.types)


def variable_name(name: str) -> str:
    """A user variable in SQL."""
    return "@`" + name.replace("`", "``") + "`"


def _asked(name: str, kind: str) -> str:
    variable = variable_name(name)
    # HEX() of a number is not the hexadecimal of its digits.
    text = variable if kind == "VARCHAR" else f"CONVERT({variable} USING utf8mb4)"
    return f"HEX({text}), COLLATION({variable}), {variable} IS NULL"


def _batched(values: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """The values, so many at once."""
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _text(cell: bytes | None) -> str:
    return (cell or b"").decode(errors="replace")

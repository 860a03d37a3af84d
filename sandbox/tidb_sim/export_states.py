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

from sandbox.tidb_sim.charsets import decode_statement
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.packets import err
from sandbox.tidb_sim.prepared_statements import PreparedStatement
from sandbox.tidb_sim.session_states import PreparedStatementState, SqlWarning, UserVariable
from sandbox.tidb_sim.stream import ConnectionClosed

_T = TypeVar("_T")
_ALWAYS_EXPORTED = (
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
_NEVER_EXPORTED = (
    # They come from the current database.
    "character_set_database",
    "collation_database",
    # No session can set them.
    "max_allowed_packet",
    "net_buffer_length",
)
_VARIABLES_PER_SELECT = 500
"""User variables that one SELECT reads."""
_VOLATILE_EXPRESSIONS = (
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
_MAX_LOCK_NAME_LENGTH = 64
"""Characters of a lock's name."""


@dataclass(frozen=True)
class VolatileState:
    """What must be asked first. `results`: None when answers are not converted; `modes`: of `sql_mode`."""

    row_count: int
    found_rows: int
    last_insert_id: int
    in_transaction: bool
    database: str
    client_charset: str
    result_charset: str | None
    sql_modes: frozenset[str]
    timestamp: str
    """Seconds since 1970, to a millionth."""

    @classmethod
    async def query(cls, backing: BackendConnection) -> Self:
        """Ask for it. No table is used, so that the warnings stay. BackingRefused, or ConnectionClosed."""
        asked = ", ".join(f"HEX(CONVERT({expression} USING utf8mb4))" for expression in _VOLATILE_EXPRESSIONS)
        (row,) = await backing.rows(f"SELECT {asked} LIMIT 1")
        values = [None if cell is None else unhex(cell).decode() for cell in row]
        return cls(
            row_count=int(values[0] or 0),
            found_rows=int(values[1] or 0),
            last_insert_id=int(values[2] or 0),
            in_transaction=values[3] in ("1", "ON"),
            database=values[4] or "",
            client_charset=values[5] or "utf8mb4",
            result_charset=values[6] or None,
            sql_modes=frozenset((values[7] or "").upper().split(",")),
            timestamp=values[8] or "",
        )


def unhex(cell: bytes) -> bytes:
    """The bytes of a value in hexadecimal, also from a session that wants its answers in UCS-2 or so."""
    return bytes.fromhex(cell.replace(b"\0", b"").decode())


def set_charsets_statement(client: str, results: str | None) -> str:
    """The statement that sets in which character sets statements come and answers go."""
    return f"SET character_set_client = {client}, character_set_results = {results or 'NULL'}"


@asynccontextmanager
async def utf8_charsets(backing: BackendConnection, moment: VolatileState) -> AsyncIterator[None]:
    """Meanwhile both are UTF-8. BackingRefused, or ConnectionClosed."""
    await backing.execute(set_charsets_statement("utf8mb4", "utf8mb4"))
    try:
        yield
    finally:
        await restore_client_session(
            backing, set_charsets_statement(moment.client_charset, moment.result_charset)
        )


async def restore_client_session(backing: BackendConnection, statement: str) -> None:
    """Execute what makes the session the client's again: KILL QUERY may hit it. ConnectionClosed."""
    try:
        await backing.execute(statement)
    except BackendError:
        try:
            await backing.execute(statement)
        except BackendError as refusal:
            raise ConnectionClosed from refusal  # rather no session than another one


async def query_held_locks(
    backing: BackendConnection, names: Iterable[bytes], moment: VolatileState
) -> set[bytes]:
    """Those of the locks of these names that the session holds. BackingRefused, or ConnectionClosed."""
    texts = {name: decode_statement(name, moment.client_charset) for name in names}
    asked = [name for name, text in texts.items() if 0 < len(text) <= _MAX_LOCK_NAME_LENGTH]
    held: set[bytes] = set()
    for some in _batched(asked, _VARIABLES_PER_SELECT):
        parts = (f"IS_USED_LOCK(CONVERT(x'{texts[name].encode().hex()}' USING utf8mb4))" for name in some)
        listed = ", ".join(f"HEX({part} <=> CONNECTION_ID())" for part in parts)
        (row,) = await backing.rows(f"SELECT {listed} LIMIT 1")
        held |= {name for name, cell in zip(some, row, strict=True) if b"1" in (cell or b"")}
    return held


async def query_warnings(backing: BackendConnection) -> tuple[SqlWarning, ...]:
    """What SHOW WARNINGS tells; no statement that uses a table may come before. In UTF-8."""
    rows = await backing.rows("SHOW WARNINGS")
    return tuple(
        SqlWarning(_decode(level), int(code or 0), _decode(message)) for level, code, message in rows
    )


async def query_system_variables(backing: BackendConnection, moment: VolatileState) -> dict[str, str]:
    """Those that a session can set and that are unlike in a new session, and a few more. In UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, SESSION_VALUE FROM information_schema.SYSTEM_VARIABLES "
        f"WHERE VARIABLE_NAME IN ({_quoted_list(_ALWAYS_EXPORTED)}) OR READ_ONLY = 'NO' "
        "AND SESSION_VALUE IS NOT NULL AND GLOBAL_VALUE IS NOT NULL "
        "AND BINARY SESSION_VALUE <> BINARY GLOBAL_VALUE "
        f"AND VARIABLE_NAME NOT IN ({_quoted_list(_NEVER_EXPORTED)}) LIMIT 10000"
    )
    found = {_decode(name).lower(): _decode(value) for name, value in rows}
    if Decimal(found["timestamp"]) != Decimal(moment.timestamp):
        del found["timestamp"]  # it goes with the clock: nobody has set it
    # Those two are others just now.
    charsets = {
        "character_set_client": moment.client_charset,
        "character_set_results": moment.result_charset or "",
    }
    return found | charsets


async def query_user_variables(backing: BackendConnection) -> dict[str, UserVariable]:
    """All of them. In UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, VARIABLE_TYPE FROM information_schema.USER_VARIABLES LIMIT 1000000"
    )
    kinds = {_decode(name): _decode(kind).upper() for name, kind in rows}
    found: dict[str, UserVariable] = {}
    for some in _batched(kinds, _VARIABLES_PER_SELECT):
        asked = ", ".join(_user_variable_columns(name, kinds[name]) for name in some)
        (values,) = await backing.rows(f"SELECT {asked} LIMIT 1")
        for number, name in enumerate(some):
            value, collation, null = values[3 * number : 3 * number + 3]
            if value is None and null == b"0":
                raise BackendError(err(1301, f"@{name} is larger than half of max_allowed_packet", "HY000"))
            kind = f"VARCHAR {_decode(collation)}" if kinds[name] == "VARCHAR" else kinds[name]
            found[name] = UserVariable(kind, None if value is None else unhex(value))
    return found


def export_statement(statement: PreparedStatement, moment: VolatileState) -> PreparedStatementState:
    """A statement as it is told."""
    text = decode_statement(statement.text, moment.client_charset)
    return PreparedStatementState(text, statement.database, statement.name, statement.parameter_types)


def quote_user_variable(name: str) -> str:
    """A user variable in SQL."""
    return "@`" + name.replace("`", "``") + "`"


def _user_variable_columns(name: str, kind: str) -> str:
    variable = quote_user_variable(name)
    # HEX() of a number is not the hexadecimal of its digits.
    text = variable if kind == "VARCHAR" else f"CONVERT({variable} USING utf8mb4)"
    return f"HEX({text}), COLLATION({variable}), {variable} IS NULL"


def _batched(values: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """The values, so many at once."""
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some


def _quoted_list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _decode(cell: bytes | None) -> str:
    return (cell or b"").decode(errors="replace")

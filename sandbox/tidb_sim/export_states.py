"""Reads the states of a session from MariaDB, which disturbs the results of the session's last statement.

MariaDB: information_schema.SYSTEM_VARIABLES and .USER_VARIABLES. All values that may be in any character set
are read in hexadecimal; each SELECT has a LIMIT, because otherwise `sql_select_limit` applies.
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
    # Without these, RAND() would restart.
    "rand_seed1",
    "rand_seed2",
    "timestamp",
)
_NEVER_EXPORTED = (
    # They follow from the current database.
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
"""In characters."""


@dataclass(frozen=True)
class VolatileState:
    """State to read first.

    `result_charset`: None if results are not converted; `sql_modes`: of `sql_mode`.
    """

    row_count: int
    found_rows: int
    last_insert_id: int
    in_transaction: bool
    database: str
    client_charset: str
    result_charset: str | None
    sql_modes: frozenset[str]
    timestamp: str
    """Seconds since 1970, with microseconds."""

    @classmethod
    async def query(cls, backing: BackendConnection) -> Self:
        """Read it without any table, which keeps the warnings. Raises BackendError or ConnectionClosed."""
        columns = ", ".join(
            f"HEX(CONVERT({expression} USING utf8mb4))" for expression in _VOLATILE_EXPRESSIONS
        )
        (row,) = await backing.rows(f"SELECT {columns} LIMIT 1")
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
    """Decode a value in hexadecimal, also from a session whose results are in UCS-2 or similar."""
    return bytes.fromhex(cell.replace(b"\0", b"").decode())


def set_charsets_statement(client: str, results: str | None) -> str:
    """Return the statement that sets the character sets of statements and results."""
    return f"SET character_set_client = {client}, character_set_results = {results or 'NULL'}"


@asynccontextmanager
async def utf8_charsets(backing: BackendConnection, moment: VolatileState) -> AsyncIterator[None]:
    """Set both character sets to UTF-8 during the block. Raises BackendError or ConnectionClosed."""
    await backing.execute(set_charsets_statement("utf8mb4", "utf8mb4"))
    try:
        yield
    finally:
        await restore_client_session(
            backing, set_charsets_statement(moment.client_charset, moment.result_charset)
        )


async def restore_client_session(backing: BackendConnection, statement: str) -> None:
    """Execute the statement that restores the client's settings: KILL QUERY may hit it.

    Raises ConnectionClosed.
    """
    try:
        await backing.execute(statement)
    except BackendError:
        try:
            await backing.execute(statement)
        except BackendError as error:
            raise ConnectionClosed from error  # Better no session than one with other settings.


async def query_held_locks(
    backing: BackendConnection, names: Iterable[bytes], moment: VolatileState
) -> set[bytes]:
    """Return those of the named locks that the session holds. Raises BackendError or ConnectionClosed."""
    texts = {name: decode_statement(name, moment.client_charset) for name in names}
    valid_names = [name for name, text in texts.items() if 0 < len(text) <= _MAX_LOCK_NAME_LENGTH]
    held: set[bytes] = set()
    for batch in _batched(valid_names, _VARIABLES_PER_SELECT):
        parts = (f"IS_USED_LOCK(CONVERT(x'{texts[name].encode().hex()}' USING utf8mb4))" for name in batch)
        columns = ", ".join(f"HEX({part} <=> CONNECTION_ID())" for part in parts)
        (row,) = await backing.rows(f"SELECT {columns} LIMIT 1")
        held |= {name for name, cell in zip(batch, row, strict=True) if b"1" in (cell or b"")}
    return held


async def query_warnings(backing: BackendConnection) -> tuple[SqlWarning, ...]:
    """Return the result of SHOW WARNINGS, in UTF-8; no statement that uses a table may run before it."""
    rows = await backing.rows("SHOW WARNINGS")
    return tuple(
        SqlWarning(_decode(level), int(code or 0), _decode(message)) for level, code, message in rows
    )


async def query_system_variables(backing: BackendConnection, moment: VolatileState) -> dict[str, str]:
    """Return the settable variables that differ from a new session's, and a few more, in UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, SESSION_VALUE FROM information_schema.SYSTEM_VARIABLES "
        f"WHERE VARIABLE_NAME IN ({_quoted_list(_ALWAYS_EXPORTED)}) OR READ_ONLY = 'NO' "
        "AND SESSION_VALUE IS NOT NULL AND GLOBAL_VALUE IS NOT NULL "
        "AND BINARY SESSION_VALUE <> BINARY GLOBAL_VALUE "
        f"AND VARIABLE_NAME NOT IN ({_quoted_list(_NEVER_EXPORTED)}) LIMIT 10000"
    )
    variables = {_decode(name).lower(): _decode(value) for name, value in rows}
    if Decimal(variables["timestamp"]) != Decimal(moment.timestamp):
        del variables["timestamp"]  # It follows the clock: it was not set explicitly.
    # These two are overridden while the states are read.
    charsets = {
        "character_set_client": moment.client_charset,
        "character_set_results": moment.result_charset or "",
    }
    return variables | charsets


async def query_user_variables(backing: BackendConnection) -> dict[str, UserVariable]:
    """Return all user variables, in UTF-8."""
    rows = await backing.rows(
        "SELECT VARIABLE_NAME, VARIABLE_TYPE FROM information_schema.USER_VARIABLES LIMIT 1000000"
    )
    kinds = {_decode(name): _decode(kind).upper() for name, kind in rows}
    variables: dict[str, UserVariable] = {}
    for batch in _batched(kinds, _VARIABLES_PER_SELECT):
        columns = ", ".join(_user_variable_columns(name, kinds[name]) for name in batch)
        (values,) = await backing.rows(f"SELECT {columns} LIMIT 1")
        for number, name in enumerate(batch):
            value, collation, null = values[3 * number : 3 * number + 3]
            if value is None and null == b"0":
                raise BackendError(err(1301, f"@{name} is larger than half of max_allowed_packet", "HY000"))
            kind = f"VARCHAR {_decode(collation)}" if kinds[name] == "VARCHAR" else kinds[name]
            variables[name] = UserVariable(kind, None if value is None else unhex(value))
    return variables


def export_statement(statement: PreparedStatement, moment: VolatileState) -> PreparedStatementState:
    """Return a prepared statement in its exported form."""
    text = decode_statement(statement.text, moment.client_charset)
    return PreparedStatementState(text, statement.database, statement.name, statement.parameter_types)


def quote_user_variable(name: str) -> str:
    """Return a user variable's name as SQL."""
    return "@`" + name.replace("`", "``") + "`"


def _user_variable_columns(name: str, kind: str) -> str:
    variable = quote_user_variable(name)
    # HEX() of a number is not the hexadecimal of its digits.
    text = variable if kind == "VARCHAR" else f"CONVERT({variable} USING utf8mb4)"
    return f"HEX({text}), COLLATION({variable}), {variable} IS NULL"


def _batched(values: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yield the values in lists of up to `size`."""
    remaining = iter(values)
    while batch := list(islice(remaining, size)):
        yield batch


def _quoted_list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _decode(cell: bytes | None) -> str:
    return (cell or b"").decode(errors="replace")

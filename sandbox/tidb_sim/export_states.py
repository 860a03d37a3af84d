"""Reads the states of a session from MariaDB. The queries change the results of the session's last statement.

The sources are information_schema.SYSTEM_VARIABLES and .USER_VARIABLES. Values may be in any character set,
so they are read in hexadecimal. Each SELECT has a LIMIT, because otherwise `sql_select_limit` applies.
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
from sandbox.tidb_sim.session_states import SqlWarning, UserVariable
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
    # Without the seeds, RAND() would restart.
    "rand_seed1",
    "rand_seed2",
    "timestamp",
)
_NEVER_EXPORTED = (
    # These follow from the current database.
    "character_set_database",
    "collation_database",
    # These cannot be set per session.
    "max_allowed_packet",
    "net_buffer_length",
)
_VARIABLES_PER_SELECT = 500  # User variables or lock names per SELECT.
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
_MAX_LOCK_NAME_LENGTH = 64  # In characters.


@dataclass(frozen=True)
class StateReadFirst:
    """The state that must be read first, because the other queries change it.

    `result_charset` is None if results are not converted. `sql_modes` are the words of `sql_mode`.
    """

    row_count: int
    found_rows: int
    last_insert_id: int
    in_transaction: bool
    database: str
    client_charset: str
    result_charset: str | None
    sql_modes: frozenset[str]
    timestamp: str  # Seconds since 1970, with microseconds.

    @classmethod
    async def query(cls, backend: BackendConnection) -> Self:
        """Read the state without a table, to keep the warnings. Raises BackendError or ConnectionClosed."""
        columns = ", ".join(
            f"HEX(CONVERT({expression} USING utf8mb4))" for expression in _VOLATILE_EXPRESSIONS
        )
        (row,) = await backend.rows(f"SELECT {columns} LIMIT 1")
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
    """Decode a hexadecimal value. Ignore the NULs of results in UCS-2 or a similar character set."""
    return bytes.fromhex(cell.replace(b"\0", b"").decode())


def set_charsets_statement(client: str, results: str | None) -> str:
    """Return the statement that sets the character sets of statements and results."""
    return f"SET character_set_client = {client}, character_set_results = {results or 'NULL'}"


@asynccontextmanager
async def utf8_charsets(
    backend: BackendConnection, client_after: str, results_after: str | None
) -> AsyncIterator[None]:
    """Set both character sets to UTF-8 during the block, then to the given ones.

    Raises BackendError or ConnectionClosed.
    """
    await backend.execute(set_charsets_statement("utf8mb4", "utf8mb4"))
    try:
        yield
    finally:
        await restore_client_session(backend, set_charsets_statement(client_after, results_after))


async def restore_client_session(backend: BackendConnection, statement: str) -> None:
    """Execute a statement that restores the client's settings. Raises ConnectionClosed."""
    try:
        await backend.execute(statement)
    except BackendError as error:
        raise ConnectionClosed from error  # Rather end the session than continue with other settings.


async def query_held_locks(
    backend: BackendConnection, names: Iterable[bytes], read_first: StateReadFirst
) -> set[bytes]:
    """Return which of the named locks the session has. Raises BackendError or ConnectionClosed."""
    texts = {name: decode_statement(name, read_first.client_charset) for name in names}
    valid_names = [name for name, text in texts.items() if 0 < len(text) <= _MAX_LOCK_NAME_LENGTH]
    held: set[bytes] = set()
    for batch in _batched(valid_names, _VARIABLES_PER_SELECT):
        parts = (f"IS_USED_LOCK(CONVERT(x'{texts[name].encode().hex()}' USING utf8mb4))" for name in batch)
        columns = ", ".join(f"HEX({part} <=> CONNECTION_ID())" for part in parts)
        (row,) = await backend.rows(f"SELECT {columns} LIMIT 1")
        held |= {name for name, cell in zip(batch, row, strict=True) if b"1" in (cell or b"")}
    return held


async def query_warnings(backend: BackendConnection) -> tuple[SqlWarning, ...]:
    """Return the warnings. Call this within `utf8_charsets`, before any statement that uses a table."""
    rows = await backend.rows("SHOW WARNINGS")
    return tuple(
        SqlWarning(_decode(level), int(code or 0), _decode(message)) for level, code, message in rows
    )


async def query_system_variables(backend: BackendConnection, read_first: StateReadFirst) -> dict[str, str]:
    """Return _ALWAYS_EXPORTED and what differs from a new session. Call this within `utf8_charsets`."""
    rows = await backend.rows(
        "SELECT VARIABLE_NAME, SESSION_VALUE FROM information_schema.SYSTEM_VARIABLES "
        f"WHERE VARIABLE_NAME IN ({_quoted_list(_ALWAYS_EXPORTED)}) OR READ_ONLY = 'NO' "
        "AND SESSION_VALUE IS NOT NULL AND GLOBAL_VALUE IS NOT NULL "
        "AND BINARY SESSION_VALUE <> BINARY GLOBAL_VALUE "
        f"AND VARIABLE_NAME NOT IN ({_quoted_list(_NEVER_EXPORTED)}) LIMIT 10000"
    )
    variables = {_decode(name).lower(): _decode(value) for name, value in rows}
    if Decimal(variables["timestamp"]) != Decimal(read_first.timestamp):
        del variables["timestamp"]  # It follows the clock, so the client has not set it.
    # `utf8_charsets` has changed these two.
    charsets = {
        "character_set_client": read_first.client_charset,
        "character_set_results": read_first.result_charset or "",
    }
    return variables | charsets


async def query_user_variables(backend: BackendConnection) -> dict[str, UserVariable]:
    """Return all user variables. Call this within `utf8_charsets`."""
    rows = await backend.rows(
        "SELECT VARIABLE_NAME, VARIABLE_TYPE FROM information_schema.USER_VARIABLES LIMIT 1000000"
    )
    kinds = {_decode(name): _decode(kind).upper() for name, kind in rows}
    variables: dict[str, UserVariable] = {}
    for batch in _batched(kinds, _VARIABLES_PER_SELECT):
        columns = ", ".join(_user_variable_columns(name, kinds[name]) for name in batch)
        (values,) = await backend.rows(f"SELECT {columns} LIMIT 1")
        for number, name in enumerate(batch):
            value, collation, null = values[3 * number : 3 * number + 3]
            if value is None and null == b"0":
                raise BackendError(err(1301, f"@{name} is larger than half of max_allowed_packet", "HY000"))
            kind = f"VARCHAR {_decode(collation)}" if kinds[name] == "VARCHAR" else kinds[name]
            variables[name] = UserVariable(kind, None if value is None else unhex(value))
    return variables


def quote_user_variable(name: str) -> str:
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

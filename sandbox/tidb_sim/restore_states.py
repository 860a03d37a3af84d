"""Restores the exported states of a session in another MariaDB session.

The order of the steps differs from TiDB's, because MariaDB parses a prepared statement with the `sql_mode`
and collation at the time of PREPARE. Texts are sent in UTF-8 and values in hexadecimal, so that no `sql_mode`
changes their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.dialect import translate_prepared
from sandbox.tidb_sim.export_states import StateReadFirst, quote_user_variable, utf8_charsets
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.prepared_statements import PreparedStatement
from sandbox.tidb_sim.session_states import PreparedStatementState, SessionStates, UserVariable
from sandbox.tidb_sim.session_tracker import SessionTracker, affects_session

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_WORD = re.compile(r"\w+", re.ASCII)
_ISOLATION_LEVEL = re.compile(r"READ-(?:UN)?COMMITTED|REPEATABLE-READ|SERIALIZABLE")
NEXT_TRANSACTION_ISOLATION = "tx_isolation_one_shot"
"""TiDB's variable for the level of the next transaction (SET TRANSACTION). MariaDB has no such variable."""


@dataclass(frozen=True)
class StateRestorer:
    """Restores states into the session of `backend`."""

    node: SimNode
    client: SqlClientInfo
    backend: BackendConnection
    tracker: SessionTracker

    async def restore(self, states: SessionStates, read_first: StateReadFirst) -> None:
        """Restore these states. `read_first`: the state of the session before the restore.

        Raises BackendError if a statement can no longer be prepared or a database does not exist any more,
        and ConnectionClosed.
        """
        variables = dict(states.system_variables or {})
        next_isolation = variables.pop(NEXT_TRANSACTION_ISOLATION, "")
        client_charset = variables.pop("character_set_client", "")
        result_charset = variables.pop("character_set_results", read_first.result_charset or "")
        async with utf8_charsets(
            self.backend,
            client_charset if _WORD.fullmatch(client_charset) else read_first.client_charset,
            result_charset if _WORD.fullmatch(result_charset) else None,
        ):
            await self._set_variables(variables)
            await self._restore_statements(states, read_first)
            for name, variable in states.user_variables.items():
                assignment = f"{quote_user_variable(name)} = {variable_expression(variable)}"
                await self.backend.execute(f"SET {assignment}")
            await self.backend.execute(f"SET LAST_INSERT_ID = {states.last_insert_id or 0}")
            # Last, because a statement after SET TRANSACTION might count as the next transaction.
            if _ISOLATION_LEVEL.fullmatch(next_isolation):
                level = next_isolation.replace("-", " ")
                await self.backend.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                self.tracker.next_transaction_isolation = next_isolation

    async def _set_variables(self, variables: Mapping[str, str]) -> None:
        """Set all variables at once. Skip variables that MariaDB rejects (TiDB warns about them)."""
        names = sorted(filter(_WORD.fullmatch, variables), key=_restore_order)
        assignments = [f"SESSION {name} = {_system_variable_expression(variables[name])}" for name in names]
        if not assignments:
            return
        try:
            await self.backend.execute("SET " + ", ".join(assignments))
        except BackendError:
            for assignment in assignments:
                with suppress(BackendError):
                    await self.backend.execute("SET " + assignment)

    async def _restore_statements(self, states: SessionStates, read_first: StateReadFirst) -> None:
        current = read_first.database
        for statement_id, statement in sorted((states.statements or {}).items()):
            if statement.database and statement.database != current:
                await self.backend.use_database(statement.database)
                current = statement.database
            self.tracker.prepared_statements.restore(statement_id, await self._prepare_statement(statement))
        # As in TiDB, missing states are reset (DecodeSessionStates, pkg/sessionctx/variable). If the last id
        # is missing, a new statement may get an id that is in use.
        self.tracker.prepared_statements.last_id = states.last_statement_id or 0
        if not states.database and read_first.database:
            self.node.record_violation(self.client.peer, "SET SESSION_STATES without the session's database")
        database = states.database or read_first.database
        if database and database != current:
            await self.backend.use_database(database)
        self.tracker.database = database

    async def _prepare_statement(self, statement: PreparedStatementState) -> PreparedStatement:
        text = statement.text.encode()
        translated = translate_prepared(text, self.node, self.client)
        if statement.name:
            name = "`" + statement.name.replace("`", "``") + "`"
            await self.backend.execute(f"PREPARE {name} FROM CONVERT(x'{translated.hex()}' USING utf8mb4)")
            return PreparedStatement(text, statement.database, name=statement.name)
        backend_id, parameter_count = await self.backend.prepare(translated)
        has_types = len(statement.parameter_types) == 2 * parameter_count
        return PreparedStatement(
            text,
            statement.database,
            backend_id,
            parameter_count,
            affects_session=affects_session(text),
            parameter_types=statement.parameter_types if has_types else b"",
            backend_knows_types=not (has_types and statement.parameter_types),
        )


def _restore_order(name: str) -> tuple[bool, bool, str]:
    """Sort autocommit last, because it may end a transaction, and some variables cannot be set within one.

    TiDB sets the others in random order. If it sets a character set after the collation, it also sets that
    character set's default collation (pkg/sessionctx/variable/sysvar.go), so sort these two in that order.
    """
    return (name == "autocommit", not name.startswith("collation_"), name)


def variable_expression(variable: UserVariable) -> str:
    """Return the value of a user variable as SQL. A number keeps its type."""
    if variable.value is None:
        return "NULL"
    if variable.collation is not None:
        literal = f"x'{variable.value.hex()}'"
        if variable.collation == "binary":
            return literal
        charset = variable.collation.partition("_")[0]
        return f"_{charset} {literal} COLLATE {variable.collation}"
    digits = variable.value.decode()
    if variable.type_name.startswith("DOUBLE"):
        return digits if "e" in digits.lower() else digits + "e0"
    if variable.type_name.startswith("DECIMAL"):
        return digits if "." in digits else digits + "."
    return f"CAST({digits} AS UNSIGNED)" if variable.type_name.endswith("UNSIGNED") else digits


def _system_variable_expression(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else f"CONVERT(x'{text.encode().hex()}' USING utf8mb4)"

"""Restores the exported states of a session in another MariaDB session.

Not in TiDB's order: MariaDB parses a statement by the `sql_mode` and collation at the time of PREPARE.
Everything is sent in UTF-8 and values in hexadecimal, so that no mode of the session matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sandbox.tidb_sim.builtin_queries import SqlClientInfo
from sandbox.tidb_sim.dialect import translate_prepared
from sandbox.tidb_sim.export_states import (
    VolatileState,
    quote_user_variable,
    restore_client_session,
    set_charsets_statement,
)
from sandbox.tidb_sim.mariadb_backend import BackendConnection, BackendError
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.prepared_statements import PreparedStatement
from sandbox.tidb_sim.session_states import PreparedStatementState, SessionStates, UserVariable
from sandbox.tidb_sim.session_tracker import SessionTracker, affects_session

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_WORD = re.compile(r"\w+", re.ASCII)
_ISOLATION_LEVEL = re.compile(r"READ-(?:UN)?COMMITTED|REPEATABLE-READ|SERIALIZABLE")
NEXT_TRANSACTION_ISOLATION = "tx_isolation_one_shot"
"""TiDB's variable for what SET TRANSACTION sets for the next transaction; MariaDB has none."""


@dataclass(frozen=True)
class StateRestorer:
    """Restores states into one session."""

    node: SimNode
    client: SqlClientInfo
    backend: BackendConnection
    tracker: SessionTracker

    async def restore(self, states: SessionStates, volatile: VolatileState) -> None:
        """Restore what the states contain, and nothing else.

        Raises BackendError if a statement can no longer be prepared or a database was dropped, or
        ConnectionClosed.
        """
        variables = dict(states.system_variables or {})
        next_isolation = variables.pop(NEXT_TRANSACTION_ISOLATION, "")
        client_charset = _word_or_default(variables.pop("character_set_client", ""), volatile.client_charset)
        result_charset: str | None = variables.pop("character_set_results", volatile.result_charset or "")
        result_charset = _word_or_default(result_charset or "", "") or None
        await self.backend.execute(set_charsets_statement("utf8mb4", "utf8mb4"))
        try:
            await self._set_variables(variables)
            await self._restore_statements(states, volatile)
            for name, variable in (states.user_variables or {}).items():
                await self.backend.execute(
                    f"SET {quote_user_variable(name)} = {variable_expression(variable)}"
                )
            await self.backend.execute(f"SET LAST_INSERT_ID = {states.last_insert_id or 0}")
            # After all statements that could count as the next transaction.
            if _ISOLATION_LEVEL.fullmatch(next_isolation):
                await self.backend.execute(
                    f"SET TRANSACTION ISOLATION LEVEL {next_isolation.replace('-', ' ')}"
                )
                self.tracker.next_transaction_isolation = next_isolation
        finally:
            await restore_client_session(self.backend, set_charsets_statement(client_charset, result_charset))

    async def _set_variables(self, variables: Mapping[str, str]) -> None:
        """Set all variables at once; those that MariaDB rejects are skipped (TiDB warns about them)."""
        # autocommit comes last: it may end a transaction, and some variables cannot be set within one.
        names = sorted(filter(_WORD.fullmatch, variables), key=lambda name: (name == "autocommit", name))
        assignments = [f"SESSION {name} = {_system_variable_expression(variables[name])}" for name in names]
        if not assignments:
            return
        try:
            await self.backend.execute("SET " + ", ".join(assignments))
        except BackendError:
            for assignment in assignments:
                with suppress(BackendError):
                    await self.backend.execute("SET " + assignment)

    async def _restore_statements(self, states: SessionStates, volatile: VolatileState) -> None:
        current = volatile.database
        for statement_id, statement in sorted((states.statements or {}).items()):
            if statement.database and statement.database != current:
                await self.backend.use_database(statement.database)
                current = statement.database
            self.tracker.prepared_statements.restore(statement_id, await self._prepare_statement(statement))
        # What the states lack is reset (DecodeSessionStates, pkg/sessionctx/variable). Without the last
        # id, a new statement may get one that is in use.
        self.tracker.prepared_statements.last_id = states.last_statement_id or 0
        if not states.database and volatile.database:
            self.node.record_violation(self.client.peer, "SET SESSION_STATES without the session's database")
        database = states.database or volatile.database
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


def variable_expression(variable: UserVariable) -> str:
    """Return the value of a user variable as SQL; a number keeps its type."""
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
    """Return the value of a system variable as SQL."""
    return text if _NUMBER.fullmatch(text) else f"CONVERT(x'{text.encode().hex()}' USING utf8mb4)"


def _word_or_default(text: str, default: str) -> str:
    return text if _WORD.fullmatch(text) else default

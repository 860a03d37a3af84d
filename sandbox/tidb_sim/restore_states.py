"""Giving a session of MariaDB the states that another one had.

Not in TiDB's order: MariaDB reads a statement as `sql_mode` and the collation say when it prepares it.
Everything is sent in UTF-8 and values in hexadecimal, so that no mode of the session matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sandbox.tidb_sim.builtin_queries import Client
from sandbox.tidb_sim.dialect import prepared
from sandbox.tidb_sim.export_states import Moment, give_back, set_charsets, variable_name
from sandbox.tidb_sim.mariadb_backend import Backing, BackingRefused
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.prepared_statements import Statement
from sandbox.tidb_sim.session_states import PreparedText, SessionStates, UserVariable
from sandbox.tidb_sim.session_tracker import Ledger, matters

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_WORD = re.compile(r"\w+", re.ASCII)
_LEVEL = re.compile(r"READ-(?:UN)?COMMITTED|REPEATABLE-READ|SERIALIZABLE")
ISOLATION_ONCE = "tx_isolation_one_shot"
"""TiDB's variable of what SET TRANSACTION sets for the next transaction; MariaDB has none."""


@dataclass(frozen=True)
class Restoration:
    """One session that gets states."""

    node: Node
    who: Client
    backing: Backing
    ledger: Ledger

    async def run(self, states: SessionStates, moment: Moment) -> None:
        """Restore what the states tell, and nothing else.

        BackingRefused: a statement cannot be prepared any more, or a database is gone. ConnectionClosed.
        """
        variables = dict(states.system_variables or {})
        once = variables.pop(ISOLATION_ONCE, "")
        client = _word(variables.pop("character_set_client", ""), moment.client)
        results: str | None = variables.pop("character_set_results", moment.results or "")
        results = _word(results or "", "") or None
        await self.backing.execute(set_charsets("utf8mb4", "utf8mb4"))
        try:
            await self._set_variables(variables)
            await self._prepare(states, moment)
            for name, variable in (states.user_variables or {}).items():
                await self.backing.execute(f"SET {variable_name(name)} = {expression(variable)}")
            await self.backing.execute(f"SET LAST_INSERT_ID = {states.last_insert_id or 0}")
            # Behind all that could be taken for the next transaction.
            if _LEVEL.fullmatch(once):
                await self.backing.execute(f"SET TRANSACTION ISOLATION LEVEL {once.replace('-', ' ')}")
                self.ledger.isolation_once = once
        finally:
            await give_back(self.backing, set_charsets(client, results))

    async def _set_variables(self, variables: Mapping[str, str]) -> None:
        """All at once; what MariaDB does not take is left out, which TiDB has a warning for."""
        # Behind the others: it may end a transaction, and some cannot be set within one.
        names = sorted(filter(_WORD.fullmatch, variables), key=lambda name: (name == "autocommit", name))
        wanted = [f"SESSION {name} = {_value(variables[name])}" for name in names]
        if not wanted:
            return
        try:
            await self.backing.execute("SET " + ", ".join(wanted))
        except BackingRefused:
            for one in wanted:
                with suppress(BackingRefused):
                    await self.backing.execute("SET " + one)

    async def _prepare(self, states: SessionStates, moment: Moment) -> None:
        current = moment.database
        for number, told in sorted((states.statements or {}).items()):
            if told.database and told.database != current:
                await self.backing.use(told.database)
                current = told.database
            self.ledger.statements.restore(number, await self._prepared(told))
        # What the states lack is reset (DecodeSessionStates, pkg/sessionctx/variable). Without the last
        # number, a new statement may get one that is in use.
        self.ledger.statements.last = states.last_statement or 0
        if not states.database and moment.database:
            self.node.violation(self.who.peer, "SET SESSION_STATES without the session's database")
        wanted = states.database or moment.database
        if wanted and wanted != current:
            await self.backing.use(wanted)
        self.ledger.database = wanted

    async def _prepared(self, told: PreparedText) -> Statement:
        text = told.text.encode()
        worded = prepared(text, self.node, self.who)
        if told.name:
            name = "`" + told.name.replace("`", "``") + "`"
            await self.backing.execute(f"PREPARE {name} FROM CONVERT(x'{worded.hex()}' USING utf8mb4)")
            return Statement(text, told.database, name=told.name)
        backing, parameters = await self.backing.prepare(worded)
        usable = len(told.types) == 2 * parameters
        return Statement(
            text,
            told.database,
            backing,
            parameters,
            matters=matters(text),
            types=told.types if usable else b"",
            typed=not (usable and told.types),
        )


def expression(variable: UserVariable) -> str:
    """The value of a user variable in SQL; a number keeps its type."""
    if variable.value is None:
        return "NULL"
    if variable.collation is not None:
        literal = f"x'{variable.value.hex()}'"
        if variable.collation == "binary":
            return literal
        charset = variable.collation.partition("_")[0]
        return f"_{charset} {literal} COLLATE {variable.collation}"
    digits = variable.value.decode()
    if variable.kind.startswith("DOUBLE"):
        return digits if "e" in digits.lower() else digits + "e0"
    if variable.kind.startswith("DECIMAL"):
        return digits if "." in digits else digits + "."
    return f"CAST({digits} AS UNSIGNED)" if variable.kind.endswith("UNSIGNED") else digits


def _value(text: str) -> str:
    """The value of a system variable in SQL."""
    return text if _NUMBER.fullmatch(text) else f"CONVERT(x'{text.encode().hex()}' USING utf8mb4)"


def _word(text: str, otherwise: str) -> str:
    return text if _WORD.fullmatch(text) else otherwise

"""The states of a session as the JSON of SHOW SESSION_STATES and SET SESSION_STATES. No I/O.

Keys: pingcap/tidb pkg/sessionctx/sessionstates/session_states.go. User variables are encoded differently than
in TiDB, since real and simulated servers never exchange states.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_VARIABLE_TYPE = re.compile(r"(?:INT|DOUBLE|DECIMAL)(?: UNSIGNED)?|VARCHAR \w+")
_NUMBER = re.compile(rb"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)
_MAX_STATEMENT_ID = (1 << 32) - 1


class InvalidSessionStates(Exception):
    """The text is not a JSON object of session states (ERR 1105)."""


@dataclass(frozen=True)
class UserVariable:
    """A user variable. `type_name`: MariaDB's type; after VARCHAR, a space and the collation.

    `value`: the digits of a number, or the bytes of a text; None for NULL.
    """

    type_name: str
    value: bytes | None

    @property
    def collation(self) -> str | None:
        """The collation of a text value; None for a number."""
        first, _, collation = self.type_name.partition(" ")
        return collation if first == "VARCHAR" else None


@dataclass(frozen=True)
class PreparedStatementState:
    """A prepared statement.

    `name`: empty unless the SQL statement PREPARE prepared it; `parameter_types`: 2 bytes per parameter.
    """

    text: str
    database: str = ""
    name: str = ""
    parameter_types: bytes = b""


@dataclass(frozen=True)
class SqlWarning:
    """One row of SHOW WARNINGS."""

    level: str
    code: int
    message: str


@dataclass(frozen=True)
class SessionStates:
    """The exported states of a session. A value is None if the states do not contain it."""

    user_variables: Mapping[str, UserVariable] = field(default_factory=dict)
    system_variables: Mapping[str, str] | None = None
    statements: Mapping[int, PreparedStatementState] | None = None
    last_statement_id: int | None = None
    status: int | None = None
    database: str | None = None
    found_rows: int | None = None
    affected_rows: int | None = None
    last_insert_id: int | None = None
    warnings: tuple[SqlWarning, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether these are the states of a whole session. A proxy may also restore a few states alone.

        A proxy never restores the SQL mode alone.
        """
        return self.statements is not None or "sql_mode" in (self.system_variables or {})

    def encode(self) -> str:
        """Return the JSON without empty values, with the blanks and key order of TiDB's type JSON."""
        variables = self.user_variables
        stored: dict[str, object] = {
            "user-var-values": {
                name: None if variable.value is None else variable.value.hex()
                for name, variable in variables.items()
            },
            "user-var-types": {name: variable.type_name for name, variable in variables.items()},
            "sys-vars": dict(self.system_variables or {}),
            "prepared-stmts": {
                str(statement_id): _encode_statement(statement)
                for statement_id, statement in (self.statements or {}).items()
            },
            "prepared-stmt-id": self.last_statement_id,
            "status": self.status,
            "current-db": self.database,
            "found-rows": self.found_rows,
            "affected-rows": self.affected_rows,
            "last-insert-id": self.last_insert_id,
            "warnings": [
                {"level": warning.level, "err": {"code": warning.code, "message": warning.message}}
                for warning in self.warnings
            ],
        }
        non_empty = {key: value for key, value in stored.items() if value}
        return json.dumps(non_empty, ensure_ascii=False, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> SessionStates:
        """Parse the JSON and ignore unknown keys. Raises InvalidSessionStates."""
        try:
            stored = _StoredStates.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "the text"
            raise InvalidSessionStates(f"json: cannot unmarshal {field}: {first['msg']}") from error
        return cls(
            user_variables=_parse_user_variables(stored.user_var_values or {}, stored.user_var_types or {}),
            system_variables=None
            if stored.sys_vars is None
            else {name: value or "" for name, value in stored.sys_vars.items()},
            statements=None
            if stored.prepared_stmts is None
            else dict(_parse_statement(*item) for item in stored.prepared_stmts.items()),
            last_statement_id=stored.prepared_stmt_id,
            status=stored.status,
            database=stored.current_db,
            found_rows=stored.found_rows,
            affected_rows=stored.affected_rows,
            last_insert_id=stored.last_insert_id,
            warnings=tuple(map(_parse_warning, stored.warnings or ())),
        )


class _StoredObject(BaseModel):
    """An object in the JSON. As in Go, null counts as a missing value."""

    model_config = ConfigDict(strict=True, alias_generator=lambda name: name.replace("_", "-"))


class _StoredStatement(_StoredObject):
    text: str | None = None
    name: str | None = None
    db: str | None = None
    types: str | None = None


class _StoredError(_StoredObject):
    code: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    message: str | None = None


class _StoredWarning(_StoredObject):
    level: str | None = None
    err: _StoredError | None = None


_Uint64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _StoredStates(_StoredObject):
    user_var_values: dict[str, str | None] | None = None
    user_var_types: dict[str, str | None] | None = None
    sys_vars: dict[str, str | None] | None = None
    prepared_stmts: dict[str, _StoredStatement | None] | None = None
    prepared_stmt_id: Annotated[int, Field(ge=0, le=_MAX_STATEMENT_ID)] | None = None
    status: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None
    current_db: str | None = None
    found_rows: _Uint64 | None = None
    affected_rows: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    last_insert_id: _Uint64 | None = None
    warnings: list[_StoredWarning] | None = None


def _encode_statement(statement: PreparedStatementState) -> dict[str, str]:
    optional = {
        "name": statement.name,
        "db": statement.database,
        "types": base64.b64encode(statement.parameter_types).decode(),
    }
    return {"text": statement.text} | {key: value for key, value in optional.items() if value}


def _parse_statement(key: str, stored: _StoredStatement | None) -> tuple[int, PreparedStatementState]:
    if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) > _MAX_STATEMENT_ID:
        raise InvalidSessionStates(f"json: cannot unmarshal number {key} into Go struct field prepared-stmts")
    stored = stored or _StoredStatement()
    try:
        types = base64.b64decode(stored.types or "", validate=True)
    except ValueError as error:
        raise InvalidSessionStates(f"illegal base64 data in the types of statement {key}") from error
    return int(key), PreparedStatementState(stored.text or "", stored.db or "", stored.name or "", types)


def _parse_user_variables(
    values: Mapping[str, str | None], types: Mapping[str, str | None]
) -> Mapping[str, UserVariable]:
    variables: dict[str, UserVariable] = {}
    for name, text in values.items():
        try:
            value = None if text is None else bytes.fromhex(text)
        except ValueError as error:
            raise InvalidSessionStates(f"the value of @{name} is not in hexadecimal") from error
        variable = variables[name] = UserVariable(types.get(name) or "", value)
        fits = variable.collation is not None or value is None or _NUMBER.fullmatch(value)
        if not _VARIABLE_TYPE.fullmatch(variable.type_name) or not fits:
            raise InvalidSessionStates(
                f"the type {variable.type_name!r} of @{name} is unknown, or its value has another type"
            )
    return variables


def _parse_warning(stored: _StoredWarning) -> SqlWarning:
    error = stored.err or _StoredError()
    return SqlWarning(stored.level or "", error.code or 0, error.message or "")

"""The states of a session as the JSON of SHOW SESSION_STATES and SET SESSION_STATES. No I/O.

Keys: pingcap/tidb pkg/sessionctx/sessionstates/session_states.go. The encoding of user variables is our own:
only TiDB needs to understand its own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

_JsonType = TypeVar("_JsonType", dict[str, Any], list[Any], str, int)
_VARIABLE_TYPE = re.compile(r"(?:INT|DOUBLE|DECIMAL)(?: UNSIGNED)?|VARCHAR \w+")
_NUMBER = re.compile(rb"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)
_SIGNED_64 = (-(1 << 63), (1 << 63) - 1)
_UNSIGNED_64 = (0, (1 << 64) - 1)
_UNSIGNED_32 = (0, (1 << 32) - 1)
_UNSIGNED_16 = (0, (1 << 16) - 1)


class InvalidSessionStates(Exception):
    """The text is no object of session states (ERR 1105, with Go's error text in TiDB)."""


@dataclass(frozen=True)
class UserVariable:
    """`type_name`: MariaDB's type, for text followed by its collation.

    `value`: a number's digits, or bytes.
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
    """A prepared statement. `name`: if prepared by SQL; `parameter_types`: 2 bytes for each parameter."""

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
    """The exported states of a session; None: not contained."""

    user_variables: Mapping[str, UserVariable] | None = None
    system_variables: Mapping[str, str] | None = None
    statements: Mapping[int, PreparedStatementState] | None = None
    last_statement_id: int | None = None
    status: int | None = None
    database: str | None = None
    found_rows: int | None = None
    affected_rows: int | None = None
    last_insert_id: int | None = None
    warnings: tuple[SqlWarning, ...] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether these are the states of a whole session, and not a few that a proxy corrects."""
        return self.system_variables is not None or self.statements is not None

    def encode(self) -> str:
        """Return the JSON with blanks and key order of TiDB's type JSON, without empty values."""
        variables = self.user_variables or {}
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
                for warning in self.warnings or ()
            ],
        }
        non_empty = {key: value for key, value in stored.items() if value}
        return json.dumps(non_empty, ensure_ascii=False, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> SessionStates:
        """Parse the JSON; unknown keys are ignored. Raises InvalidSessionStates."""
        try:
            stored = json.loads(text)
            # Half a surrogate pair cannot be sent to MariaDB.
            json.dumps(stored, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidSessionStates(f"invalid JSON: {error}") from error
        if not isinstance(stored, dict):
            _raise_wrong_type(stored, "", "SessionStates")
        statements = _optional_field(stored, "prepared-stmts", dict)
        system = _optional_field(stored, "sys-vars", dict)
        warnings = _optional_field(stored, "warnings", list)
        return cls(
            user_variables=_parse_user_variables(stored),
            system_variables=None
            if system is None
            else {name: _required_field(system, name, str) for name in system},
            statements=None
            if statements is None
            else dict(_parse_statement(statements, key) for key in statements),
            last_statement_id=_parse_number(stored, "prepared-stmt-id", _UNSIGNED_32),
            status=_parse_number(stored, "status", _UNSIGNED_16),
            database=_optional_field(stored, "current-db", str),
            found_rows=_parse_number(stored, "found-rows", _UNSIGNED_64),
            affected_rows=_parse_number(stored, "affected-rows", _SIGNED_64),
            last_insert_id=_parse_number(stored, "last-insert-id", _UNSIGNED_64),
            warnings=None if warnings is None else tuple(_parse_warning(warning) for warning in warnings),
        )


def _encode_statement(statement: PreparedStatementState) -> dict[str, str]:
    optional = {
        "name": statement.name,
        "db": statement.database,
        "types": base64.b64encode(statement.parameter_types).decode(),
    }
    return {"text": statement.text} | {key: value for key, value in optional.items() if value}


def _parse_statement(statements: dict[str, Any], key: str) -> tuple[int, PreparedStatementState]:
    if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) > _UNSIGNED_32[1]:
        raise InvalidSessionStates(f"json: cannot unmarshal number {key} into Go struct field prepared-stmts")
    stored = _required_field(statements, key, dict)
    name, database, types = (_optional_field(stored, field, str) or "" for field in ("name", "db", "types"))
    try:
        decoded = base64.b64decode(types, validate=True)
    except ValueError as error:
        raise InvalidSessionStates(f"illegal base64 data in the types of statement {key}") from error
    return int(key), PreparedStatementState(_required_field(stored, "text", str), database, name, decoded)


def _parse_user_variables(stored: dict[str, Any]) -> Mapping[str, UserVariable] | None:
    values, types = (
        _optional_field(stored, "user-var-values", dict),
        _optional_field(stored, "user-var-types", dict),
    )
    if values is None and types is None:
        return None
    return {name: _parse_user_variable(values or {}, types or {}, name) for name in values or {}}


def _parse_user_variable(values: dict[str, Any], types: dict[str, Any], name: str) -> UserVariable:
    type_name = _required_field(types, name, str)
    text = _optional_field(values, name, str)
    try:
        value = None if text is None else bytes.fromhex(text)
    except ValueError as error:
        raise InvalidSessionStates(f"the value of @{name} is not in hexadecimal") from error
    variable = UserVariable(type_name, value)
    fits = variable.collation is not None or value is None or _NUMBER.fullmatch(value)
    if not _VARIABLE_TYPE.fullmatch(type_name) or not fits:
        raise InvalidSessionStates(
            f"the type {type_name!r} of @{name} is unknown, or its value has another type"
        )
    return variable


def _parse_warning(stored: object) -> SqlWarning:
    if not isinstance(stored, dict):
        _raise_wrong_type(stored, "", "stmtctx.SQLWarn")
    error = _optional_field(stored, "err", dict) or {}
    return SqlWarning(
        _required_field(stored, "level", str),
        _parse_number(error, "code", _UNSIGNED_32) or 0,
        _optional_field(error, "message", str) or "",
    )


def _parse_number(stored: dict[str, Any], key: str, limits: tuple[int, int]) -> int | None:
    value = _optional_field(stored, key, int)
    if value is not None and not limits[0] <= value <= limits[1]:
        raise InvalidSessionStates(f"json: cannot unmarshal number {value} into Go struct field {key}")
    return value


def _required_field(stored: dict[str, Any], key: str, expected_type: type[_JsonType]) -> _JsonType:
    """Return the field's value, or an empty value of its type."""
    value = _optional_field(stored, key, expected_type)
    return expected_type() if value is None else value


def _optional_field(stored: dict[str, Any], key: str, expected_type: type[_JsonType]) -> _JsonType | None:
    """Return the field's value; None if it is missing or null.

    Raises InvalidSessionStates for another type.
    """
    value = stored.get(key)
    if value is None:
        return None
    if not isinstance(value, expected_type) or isinstance(value, bool):
        _raise_wrong_type(value, key, expected_type.__name__)
    return value


def _raise_wrong_type(value: object, key: str, kind: str) -> NoReturn:
    names = {dict: "object", list: "array", str: "string", bool: "bool"}
    type_name = names.get(type(value), "number")
    field = f"struct field SessionStates.{key}" if key else "value"
    raise InvalidSessionStates(f"json: cannot unmarshal {type_name} into Go {field} of type {kind}")

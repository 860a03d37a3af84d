"""The states of a session as the JSON that SHOW SESSION_STATES gives and SET SESSION_STATES takes. Pure.

Keys: pingcap/tidb pkg/sessionctx/sessionstates/session_states.go. How a user variable is encoded is our own:
only TiDB needs to understand it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

_Kind = TypeVar("_Kind", dict[str, Any], list[Any], str, int)
_VARIABLE_KIND = re.compile(r"(?:INT|DOUBLE|DECIMAL)(?: UNSIGNED)?|VARCHAR \w+")
_NUMBER = re.compile(rb"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)
_SIGNED_64 = (-(1 << 63), (1 << 63) - 1)
_UNSIGNED_64 = (0, (1 << 64) - 1)
_UNSIGNED_32 = (0, (1 << 32) - 1)
_UNSIGNED_16 = (0, (1 << 16) - 1)


class BadStates(Exception):
    """The text is no object of session states (ERR 1105, with Go's words in TiDB)."""


@dataclass(frozen=True)
class UserVariable:
    """`kind`: MariaDB's type, for text followed by its collation. `value`: the number's digits, or bytes."""

    kind: str
    value: bytes | None

    @property
    def collation(self) -> str | None:
        """The collation of a text; None for a number."""
        first, _, collation = self.kind.partition(" ")
        return collation if first == "VARCHAR" else None


@dataclass(frozen=True)
class PreparedText:
    """A prepared statement. `name`: of one that SQL prepared; `types`: of its parameters, 2 bytes each."""

    text: str
    database: str = ""
    name: str = ""
    types: bytes = b""


@dataclass(frozen=True)
class Warned:
    """One row of SHOW WARNINGS."""

    level: str
    code: int
    message: str


@dataclass(frozen=True)
class SessionStates:
    """What is known of a session; None: nothing is said about it."""

    user_variables: Mapping[str, UserVariable] | None = None
    system_variables: Mapping[str, str] | None = None
    statements: Mapping[int, PreparedText] | None = None
    last_statement: int | None = None
    status: int | None = None
    database: str | None = None
    found_rows: int | None = None
    affected_rows: int | None = None
    last_insert_id: int | None = None
    warnings: tuple[Warned, ...] | None = None

    @property
    def full(self) -> bool:
        """Whether these are the states of a whole session, and not a few that somebody puts right."""
        return self.system_variables is not None or self.statements is not None

    def encode(self) -> str:
        """The JSON, blanks and order of keys as TiDB's type JSON has them. What is empty is left out."""
        variables = self.user_variables or {}
        stored: dict[str, object] = {
            "user-var-values": {
                name: None if one.value is None else one.value.hex() for name, one in variables.items()
            },
            "user-var-types": {name: one.kind for name, one in variables.items()},
            "sys-vars": dict(self.system_variables or {}),
            "prepared-stmts": {str(number): _stored(one) for number, one in (self.statements or {}).items()},
            "prepared-stmt-id": self.last_statement,
            "status": self.status,
            "current-db": self.database,
            "found-rows": self.found_rows,
            "affected-rows": self.affected_rows,
            "last-insert-id": self.last_insert_id,
            "warnings": [
                {"level": one.level, "err": {"code": one.code, "message": one.message}}
                for one in self.warnings or ()
            ],
        }
        kept = {key: value for key, value in stored.items() if value}
        return json.dumps(kept, ensure_ascii=False, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> SessionStates:
        """Read the JSON; keys that we do not know are ignored. BadStates."""
        try:
            stored = json.loads(text)
            # Half a surrogate pair cannot be sent to MariaDB.
            json.dumps(stored, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise BadStates(f"invalid JSON: {error}") from error
        if not isinstance(stored, dict):
            _unfit(stored, "", "SessionStates")
        statements = _field(stored, "prepared-stmts", dict)
        system = _field(stored, "sys-vars", dict)
        warnings = _field(stored, "warnings", list)
        return cls(
            user_variables=_user_variables(stored),
            system_variables=None if system is None else {name: _of(system, name, str) for name in system},
            statements=None if statements is None else dict(_prepared(statements, key) for key in statements),
            last_statement=_number(stored, "prepared-stmt-id", _UNSIGNED_32),
            status=_number(stored, "status", _UNSIGNED_16),
            database=_field(stored, "current-db", str),
            found_rows=_number(stored, "found-rows", _UNSIGNED_64),
            affected_rows=_number(stored, "affected-rows", _SIGNED_64),
            last_insert_id=_number(stored, "last-insert-id", _UNSIGNED_64),
            warnings=None if warnings is None else tuple(_warned(one) for one in warnings),
        )


def _stored(statement: PreparedText) -> dict[str, str]:
    optional = {
        "name": statement.name,
        "db": statement.database,
        "types": base64.b64encode(statement.types).decode(),
    }
    return {"text": statement.text} | {key: value for key, value in optional.items() if value}


def _prepared(statements: dict[str, Any], key: str) -> tuple[int, PreparedText]:
    if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) > _UNSIGNED_32[1]:
        raise BadStates(f"json: cannot unmarshal number {key} into Go struct field prepared-stmts")
    stored = _of(statements, key, dict)
    name, database, types = (_field(stored, field, str) or "" for field in ("name", "db", "types"))
    try:
        decoded = base64.b64decode(types, validate=True)
    except ValueError as error:
        raise BadStates(f"illegal base64 data in the types of statement {key}") from error
    return int(key), PreparedText(_of(stored, "text", str), database, name, decoded)


def _user_variables(stored: dict[str, Any]) -> Mapping[str, UserVariable] | None:
    values, kinds = _field(stored, "user-var-values", dict), _field(stored, "user-var-types", dict)
    if values is None and kinds is None:
        return None
    return {name: _user_variable(values or {}, kinds or {}, name) for name in values or {}}


def _user_variable(values: dict[str, Any], kinds: dict[str, Any], name: str) -> UserVariable:
    kind = _of(kinds, name, str)
    text = _field(values, name, str)
    try:
        value = None if text is None else bytes.fromhex(text)
    except ValueError as error:
        raise BadStates(f"the value of @{name} is not in hexadecimal") from error
    variable = UserVariable(kind, value)
    fits = variable.collation is not None or value is None or _NUMBER.fullmatch(value)
    if not _VARIABLE_KIND.fullmatch(kind) or not fits:
        raise BadStates(f"the type {kind!r} of @{name} is unknown, or its value is of another")
    return variable


def _warned(stored: object) -> Warned:
    if not isinstance(stored, dict):
        _unfit(stored, "", "stmtctx.SQLWarn")
    error = _field(stored, "err", dict) or {}
    return Warned(
        _of(stored, "level", str),
        _number(error, "code", _UNSIGNED_32) or 0,
        _field(error, "message", str) or "",
    )


def _number(stored: dict[str, Any], key: str, limits: tuple[int, int]) -> int | None:
    value = _field(stored, key, int)
    if value is not None and not limits[0] <= value <= limits[1]:
        raise BadStates(f"json: cannot unmarshal number {value} into Go struct field {key}")
    return value


def _of(stored: dict[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    """What must be there."""
    value = _field(stored, key, kind)
    return kind() if value is None else value


def _field(stored: dict[str, Any], key: str, kind: type[_Kind]) -> _Kind | None:
    """What is there, of that kind; None when nothing is, or null."""
    value = stored.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        _unfit(value, key, kind.__name__)
    return value


def _unfit(value: object, key: str, kind: str) -> NoReturn:
    names = {dict: "object", list: "array", str: "string", bool: "bool"}
    told = names.get(type(value), "number")
    field = f"struct field SessionStates.{key}" if key else "value"
    raise BadStates(f"json: cannot unmarshal {told} into Go {field} of type {kind}")

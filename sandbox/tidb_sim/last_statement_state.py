"""Results of the last statement, such as ROW_COUNT(), that MariaDB has lost. No I/O.

Exporting or restoring session states in MariaDB changes ROW_COUNT(), FOUND_ROWS() and the warnings. So this
module keeps their values and inserts them into the next statement, in place of the expressions that query
them. It does so only for COM_QUERY, because a prepared statement would return the same values at each
execution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sandbox.tidb_sim.packets import TYPE_LONGLONG, TYPE_VAR_STRING, result_set
from sandbox.tidb_sim.session_states import SqlWarning
from sandbox.tidb_sim.sql_lexer import STRING_LITERAL_PATTERNS, split_statements

_KEYWORDS = (b"row_count", b"found_rows", b"warning_count", b"error_count")
"""If a statement, in lower case, contains none of these, nothing is replaced."""
_RESULT_TOKEN = re.compile(
    rb"(?isx)"
    + STRING_LITERAL_PATTERNS[True]
    + rb"""| `[^`]*+` | /\*.*?\*/  # stay unchanged
    | (?:\#|--(?=\s))[^\n]*
    | (?P<end>;)
    | (?P<paren>[()])
    | (?<![\w.@]) (?P<function>row_count|found_rows) \s*\(\s*\)
    | @@ (?:(?:session|local)\.)? (?P<count>warning|error)_count \b"""
)
_STARTS_SELECT_ITEM = re.compile(rb"(?is)(?:^\s*select|,)\s*\Z")
_ENDS_SELECT_ITEM = re.compile(rb"(?is)\s*(?:,|;|\0|\Z|from\b)")
_SELECTS_WARNING_COUNT = re.compile(
    rb"(?is)\s*select\b(?!.*\bfrom\b).*@@(?:(?:session|local)\.)?(?:warning|error)_count\b"
)
_KEEPS_FOUND_ROWS = re.compile(
    rb"(?i)\s*(?:set|do|use|insert|replace|update|delete|begin|start|commit|rollback|prepare|deallocate)\b"
)
_WARNING_COLUMNS = (("Level", TYPE_VAR_STRING), ("Code", TYPE_LONGLONG), ("Message", TYPE_VAR_STRING))


@dataclass(frozen=True)
class LastStatementState:
    """The values that the next statement must see. A value is None if MariaDB has the right value."""

    row_count: int | None = None
    found_rows: int | None = None
    warnings: tuple[SqlWarning, ...] | None = None

    def substitute(self, statement: bytes) -> bytes:
        """Replace the expressions that query these values. The columns of the result keep their names.

        Of several statements in one text, only the first is changed: each later statement queries the results
        of its predecessor.
        """
        lower = statement.lower()
        if not any(hint in lower for hint in _KEYWORDS):
            return statement
        parts: list[bytes] = []
        at = depth = 0
        for token in _RESULT_TOKEN.finditer(statement):
            if token["end"] is not None:
                break
            if token["paren"] is not None:
                depth += 1 if token[0] == b"(" else -1
            value = self._value_of(token)
            if value is None:
                continue
            parts += [statement[at : token.start()], b"(%d)" % value if value < 0 else b"%d" % value]
            at = token.end()
            starts_item = _STARTS_SELECT_ITEM.search(statement[: token.start()])
            if depth == 0 and starts_item and _ENDS_SELECT_ITEM.match(statement, at):
                parts.append(b" as `" + token[0] + b"`")
        return b"".join((*parts, statement[at:])) if parts else statement

    def after_statement(self, statement: bytes) -> LastStatementState | None:
        """Return the values that are still valid after a statement was executed; None if there are none."""
        if len(split_statements(statement)) > 1:
            return None
        remaining = replace(
            self,
            row_count=None,
            found_rows=self.found_rows if _KEEPS_FOUND_ROWS.match(statement) else None,
            warnings=self.warnings if _SELECTS_WARNING_COUNT.match(statement) else None,
        )
        return None if remaining == LastStatementState() else remaining

    def answer_show_warnings(self, statement: str, status: int, *, deprecate_eof: bool) -> list[bytes] | None:
        """Return the response to a normalized SHOW WARNINGS or SHOW ERRORS; None if MariaDB must answer."""
        words = statement.split()
        if self.warnings is None or words[:1] != ["show"] or words[-1] not in ("warnings", "errors"):
            return None
        warnings = _filter_warnings(self.warnings, words[-1])
        columns: Sequence[tuple[str, int]] = _WARNING_COLUMNS
        rows: list[Sequence[bytes]]
        if words[1:-1] == ["count(*)"]:
            columns = ((f"@@session.{words[-1][:-1]}_count", TYPE_LONGLONG),)
            rows = [(b"%d" % len(warnings),)]
        elif len(words) == 2:
            rows = [
                (warning.level.encode(), b"%d" % warning.code, warning.message.encode())
                for warning in warnings
            ]
        else:
            return None
        return result_set(columns, rows, status, deprecate_eof=deprecate_eof)

    def _value_of(self, token: re.Match[bytes]) -> int | None:
        if token["count"] is not None:
            if self.warnings is None:
                return None
            return len(_filter_warnings(self.warnings, token["count"].decode().lower() + "s"))
        if token["function"] is None:
            return None
        return self.row_count if token["function"].lower() == b"row_count" else self.found_rows


def _filter_warnings(warnings: tuple[SqlWarning, ...], kind: str) -> list[SqlWarning]:
    return [warning for warning in warnings if kind == "warnings" or warning.level.lower() == "error"]

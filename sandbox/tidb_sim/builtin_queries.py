"""Statements that the simulated server answers itself, because MariaDB would answer with its own identity."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.tidb_sim.node import SimNode

MAX_STATEMENT_BYTES = 64  # Longer statements are never answered here.


@dataclass(frozen=True)
class SqlClientInfo:
    """The connected client: `host:port`, user of the login, host of the account, and TLS in use."""

    peer: str = ""
    user: str = ""
    account_host: str = "%"
    tls_version: str = ""
    tls_cipher: str = ""

    @property
    def identity(self) -> str:
        """The result of USER(): the user and the peer's IP address."""
        return f"{self.user}@{self.peer.rpartition(':')[0].strip('[]')}"

    @property
    def account(self) -> str:
        """The result of CURRENT_USER(): the account that the user logged in to."""
        return f"{self.user}@{self.account_host}"


BuiltinRow = tuple[tuple[str, str | int], ...]  # Column names and values of a result set with a single row.


def normalize_statement(text: bytes) -> str:
    """Return the statement in lower case, without outer blanks, final semicolon and NULs (as in TiDB)."""
    return text.rstrip(b"\0").decode(errors="replace").strip().rstrip(";").rstrip().lower()


def answer_builtin(statement: str, node: SimNode, client: SqlClientInfo) -> BuiltinRow | None:
    """Return the row that answers a normalized statement, or None if MariaDB must answer."""
    if statement.startswith("select "):
        expression = statement.removeprefix("select ").strip()
        value = _evaluate(expression, node, client)
        return None if value is None else ((expression, value),)
    if statement.startswith("show ") and "like 'ssl_" in statement:
        words = statement.replace("session ", "").split()
        variables = {
            "'ssl_cipher'": ("Ssl_cipher", client.tls_cipher),
            "'ssl_version'": ("Ssl_version", client.tls_version),
        }
        if words[:3] == ["show", "status", "like"] and len(words) == 4 and words[3] in variables:
            name, text = variables[words[3]]
            return (("Variable_name", name), ("Value", text))
    return None


def select_statement_for(row: BuiltinRow) -> bytes:
    """Return a SELECT statement that returns this row. Unlike the row, it can be prepared."""
    parts = (
        f"{value if isinstance(value, int) else quote_literal(value)} as `{name}`" for name, value in row
    )
    return ("select " + ", ".join(parts)).encode()


def _evaluate(expression: str, node: SimNode, client: SqlClientInfo) -> str | int | None:
    match expression:
        case "@@port":
            return node.sql_port
        case "@@hostname":
            return node.name
        case "version()" | "@@version":
            return node.server_version
        case "user()" | "session_user()" | "system_user()":
            return client.identity
        case "current_user()" | "current_user":
            return client.account
        case _:
            return None


def quote_literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"

"""Statements that a stand-in answers itself, because MariaDB would say who MariaDB is."""

from __future__ import annotations

from sandbox.tidb_sim.node import GIT_HASH, Node

LONGEST = 64
"""No statement that is answered here is longer, in bytes."""

SHUTDOWN = "shutdown"


def normalised(text: bytes) -> str:
    """The statement without case, outer blanks and end mark; TiDB trims a trailing NUL too."""
    return text.rstrip(b"\0").decode(errors="replace").strip().rstrip(";").rstrip().lower()


def answer(statement: str, node: Node, peer: str) -> tuple[str, str | int] | None:
    """Column name and value of a normalised statement's only row, or None when MariaDB shall answer."""
    if not statement.startswith("select "):
        return None
    expression = statement.removeprefix("select ").strip()
    match expression:
        case "@@port":
            return expression, node.sql_port
        case "@@hostname":
            return expression, node.name
        case "version()" | "@@version":
            return expression, node.server_version
        case "@@tidb_sim_peer":
            return expression, peer
        case "tidb_version()":
            return (
                expression,
                f"Release Version: {node.release}\nEdition: Community\nGit Commit Hash: {GIT_HASH}",
            )
        case _:
            return None

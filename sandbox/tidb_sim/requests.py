"""What becomes of a whole request: TiDB's own answer, or what MariaDB gets in its place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from sandbox.tidb_sim.answers import LONGEST, SHUTDOWN, Client, answer, as_select, normalised
from sandbox.tidb_sim.dialect import translated
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.packets import HEADER_SIZE, Command, err, frame, ok, one_row
from sandbox.tidb_sim.statements import Statements

_SERVED = frozenset(Command)


class Deed(Enum):
    """A request that is neither answered nor passed on as one."""

    QUIT = auto()
    CHANGE_USER = auto()
    SHUT_DOWN = auto()


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one session."""

    node: Node
    who: Client
    statements: Statements
    deprecate_eof: bool

    def judge(self, request: bytes, status: int) -> bytes | list[bytes] | Deed:
        """Of a request with its header: the packet for MariaDB, or the payloads of the answer, or a deed.

        `status`: the server status flags that were told last.
        """
        command = request[HEADER_SIZE]
        if command == Command.QUERY:
            if len(request) <= HEADER_SIZE + 1 + LONGEST:
                own = self._own(request[HEADER_SIZE + 1 :], status)
                if own is not None:
                    return own
            return self._worded(request)
        if command == Command.STMT_PREPARE:
            return self._worded(request)
        if command == Command.PING and self.node.stopping:
            return [err(1053, "Server shutdown in progress", "08S01")]
        if command == Command.QUIT:
            return Deed.QUIT
        if command == Command.CHANGE_USER:
            return Deed.CHANGE_USER
        if command == Command.SHUTDOWN:
            return Deed.SHUT_DOWN
        if command not in _SERVED:
            return [err(1105, f"command {command} not supported now", "HY000")]
        payload, refusal = self.statements.judge(request[HEADER_SIZE:])
        return frame(0, payload) if refusal is None else [refusal]

    def _own(self, text: bytes, status: int) -> list[bytes] | Deed | None:
        statement = normalised(text)
        if not statement:
            return [ok(status)]
        if statement == SHUTDOWN:
            return Deed.SHUT_DOWN
        own = answer(statement, self.node, self.who)
        return None if own is None else one_row(own, status, deprecate_eof=self.deprecate_eof)

    def _worded(self, request: bytes) -> bytes:
        """A QUERY or PREPARE in words that make MariaDB say what TiDB would."""
        text = request[HEADER_SIZE + 1 :]
        own = answer(normalised(text), self.node, self.who) if len(text) <= LONGEST else None
        worded = translated(text, self.who) if own is None else as_select(own)
        return request if worded is text else frame(0, request[HEADER_SIZE : HEADER_SIZE + 1] + worded)

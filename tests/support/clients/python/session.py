"""What the script asks of a driver. Each driver's own module says how it does it, or why it cannot."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tests.support.clients.python.plan import MatrixPlan

Rows = list[tuple[Any, ...]]

FETCH_ROWS = 10_000
"""Rows that are read at once where a result is read piece by piece."""


class NotSupported(Exception):
    """The driver has no such thing; the text says so."""


class DriverSession(ABC):
    """One connection. Parameters in SQL are `?`, and `?` and `%` stand for nothing else there."""

    misreads_large_text = False
    """Whether the driver itself fails to read a row over 16 MiB in the text protocol.

    Such a row may begin with 0xfe, as the packet that ends the rows does; only its length tells.
    """
    misreads_large_binary = False
    """The same in the binary protocol."""

    def __init__(self, plan: MatrixPlan, user: str, password: str) -> None:
        self.plan, self.user, self.password = plan, user, password
        before = _connected_sockets()
        self.connect()
        ((self._descriptor, _),) = _connected_sockets() - before

    @abstractmethod
    def connect(self) -> None:
        """Log in, with autocommit, and with TLS when the plan has a CA."""

    def connection_arguments(self) -> dict[str, Any]:
        """Whom to connect to and how, in the names that all drivers use alike."""
        return {
            "host": self.plan.host,
            "port": self.plan.port,
            "user": self.user,
            "password": self.password,
            "database": self.plan.database,
            "charset": "utf8mb4",
            "autocommit": True,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.drop_connection()  # what the driver thinks of its state after an error is not the question here

    @classmethod
    @abstractmethod
    def error_code(cls, error: Exception) -> int | None:
        """The MySQL error code of a driver's exception; None when it has none."""

    @abstractmethod
    def close(self) -> None:
        """End it politely, with COM_QUIT."""

    @abstractmethod
    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """COM_QUERY, with the parameters written into the statement; all rows."""

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """COM_STMT_PREPARE and COM_STMT_EXECUTE; all rows."""
        raise NotSupported("no prepared statements")

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction."""

    @abstractmethod
    def commit(self) -> None:
        """Commit it."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll it back."""

    @abstractmethod
    def multi_statement(self, sql: str) -> list[Rows]:
        """Several statements in one COM_QUERY; the rows of those that have a result set."""

    @abstractmethod
    def stream(self, sql: str) -> tuple[int, int]:
        """Read a result of one integer column row by row; number of rows and their sum."""

    def stream_prepared(self, sql: str) -> tuple[int, int]:
        """The same in the binary protocol."""
        raise NotSupported("no prepared statements")

    @abstractmethod
    def begin_stream(self, sql: str, rows: int) -> None:
        """Read so many rows of a result and leave the others where they are."""

    def cursor_fetch(self, sql: str, rows: int) -> tuple[int, int]:
        """As `stream_prepared`, from a cursor on the server, `rows` in each COM_STMT_FETCH."""
        raise NotSupported("no server-side cursors")

    def batch(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run an INSERT for all rows by the driver's own means for that."""
        raise NotSupported("no protocol of its own for batches")

    def change_user(self, user: str, password: str) -> None:
        """COM_CHANGE_USER."""
        raise NotSupported("no change of user")

    def reset(self) -> None:
        """COM_RESET_CONNECTION."""
        raise NotSupported("no reset of a connection")

    @abstractmethod
    def ping(self) -> None:
        """COM_PING, without any reconnecting."""

    def drop_connection(self) -> None:
        """Drop the TCP connection without a word to the driver or the server, as a crash does.

        Something else is put into the place of the socket, which closes it: after a mere shutdown(2) a server
        that waits for us to read would wait on.
        """
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), self._descriptor)


def _connected_sockets() -> set[tuple[int, str]]:
    """Descriptors of this process that are connected TCP sockets, for the C drivers do not tell theirs.

    With what the kernel calls each: a number may be in use again.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as candidate:
                if candidate.family in (socket.AF_INET, socket.AF_INET6):
                    candidate.getpeername()
                    found.add((int(name), kind))
        except OSError:
            continue
    return found

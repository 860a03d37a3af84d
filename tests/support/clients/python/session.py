"""The operations that script.py requires of a driver. Each driver's module implements or rejects them."""

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
"""Rows per read of a result that is read in pieces."""


class NotSupported(Exception):
    """The driver lacks the feature that the text names."""


class DriverSession(ABC):
    """One connection. In SQL, `?` is a parameter; `?` and `%` must not occur otherwise."""

    misreads_large_text = False
    """Whether the driver cannot read a row over 16 MiB in the text protocol.

    Such a row may start with 0xfe, like the packet that ends the rows. Only the packets' lengths differ.
    """
    misreads_large_binary = False
    """Whether the driver cannot read a row over 16 MiB in the binary protocol."""

    def __init__(self, plan: MatrixPlan, user: str, password: str) -> None:
        self.plan, self.user, self.password = plan, user, password
        previous_sockets = _connected_sockets()
        self.connect()
        ((self._descriptor, _),) = _connected_sockets() - previous_sockets

    @abstractmethod
    def connect(self) -> None:
        """Log in, with autocommit, and with TLS if the plan has a CA."""

    def connection_arguments(self) -> dict[str, Any]:
        """Return the connection arguments that all drivers share."""
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
            self.drop_connection()  # The driver's state after an error is not tested here.

    @classmethod
    @abstractmethod
    def error_code(cls, error: Exception) -> int | None:
        """Return the MySQL error code of a driver's exception, None if the exception has no code."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection with COM_QUIT."""

    @abstractmethod
    def text(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Run COM_QUERY with the parameters in the statement; return all rows."""

    def prepared(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Run COM_STMT_PREPARE and COM_STMT_EXECUTE; return all rows."""
        raise NotSupported("no prepared statements")

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll the transaction back."""

    @abstractmethod
    def multi_statement(self, sql: str) -> list[Rows]:
        """Run several statements in one COM_QUERY; return the rows of each result set."""

    @abstractmethod
    def stream(self, sql: str) -> tuple[int, int]:
        """Read a result of one integer column row by row; return the number of rows and the sum."""

    def stream_prepared(self, sql: str) -> tuple[int, int]:
        """Like `stream`, in the binary protocol."""
        raise NotSupported("no prepared statements")

    @abstractmethod
    def begin_stream(self, sql: str, rows: int) -> None:
        """Read the first `rows` rows of a result, and do not read the rest."""

    def cursor_fetch(self, sql: str, rows: int) -> tuple[int, int]:
        """Like `stream_prepared`, from a cursor on the server, with `rows` per COM_STMT_FETCH."""
        raise NotSupported("no server-side cursors")

    def batch(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run an INSERT for all rows with the driver's batch method."""
        raise NotSupported("no protocol of its own for batches")

    def change_user(self, user: str, password: str) -> None:
        """Run COM_CHANGE_USER."""
        raise NotSupported("no change of user")

    def reset(self) -> None:
        """Run COM_RESET_CONNECTION."""
        raise NotSupported("no reset of a connection")

    @abstractmethod
    def ping(self) -> None:
        """Send COM_PING. Do not reconnect if the connection is lost."""

    def drop_connection(self) -> None:
        """Drop the TCP connection without notifying the driver or the server, as a crash does.

        dup2(2) closes the socket and gives its descriptor another file. After shutdown(2) instead, a server
        that waits until the client reads would wait forever.
        """
        with open(os.devnull) as replacement:
            os.dup2(replacement.fileno(), self._descriptor)


def _connected_sockets() -> set[tuple[int, str]]:
    """Return descriptor and kernel name of each connected TCP socket. C drivers do not expose their sockets.

    The kernel name distinguishes sockets that use the same descriptor one after the other.
    """
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as candidate:
                if candidate.family in (socket.AF_INET, socket.AF_INET6):
                    candidate.getpeername()
                    sockets.add((int(name), kind))
        except OSError:
            continue
    return sockets

"""The two connections of a relay, and what is going on between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from sandbox.tidb_sim.stream import PacketStream


class Phase(Enum):
    """What a relay is about."""

    IDLE = auto()
    SENDING = auto()
    """A long request is on its way to MariaDB."""
    WAITING = auto()
    """The answer is on its way."""
    LOADING = auto()
    """LOAD DATA LOCAL: the client sends the file."""
    OVER = auto()


class End(asyncio.Protocol):
    """One of the two connections: hands everything to the relay, and its loss to its stream as well."""

    def __init__(
        self,
        stream: PacketStream,
        receive: Callable[[bytes], None],
        lost: Callable[[], None],
        full: Callable[[bool], None],
    ) -> None:
        self._stream, self._receive, self._lost, self._full = stream, receive, lost, full

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.connection_lost(error)
        self._lost()

    def pause_writing(self) -> None:
        self._full(True)

    def resume_writing(self) -> None:
        self._full(False)

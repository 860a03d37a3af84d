"""The two connections of a relay and the phases of its exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from sandbox.tidb_sim.stream import PacketStream


class RelayPhase(Enum):
    """What a relay is doing."""

    IDLE = auto()
    FORWARDING_REQUEST = auto()
    """A long request is being forwarded to MariaDB."""
    AWAITING_RESPONSE = auto()
    """MariaDB's response is awaited or being forwarded."""
    RECEIVING_FILE = auto()
    """LOAD DATA LOCAL: the client sends the file."""
    CLOSED = auto()


class RelayEndpoint(asyncio.Protocol):
    """One of the two connections: passes all data to the relay, and its loss to its stream as well."""

    def __init__(
        self,
        stream: PacketStream,
        on_data: Callable[[bytes], None],
        on_connection_lost: Callable[[], None],
        on_write_paused: Callable[[bool], None],
    ) -> None:
        self._stream, self._on_data, self._on_connection_lost, self._on_write_paused = (
            stream,
            on_data,
            on_connection_lost,
            on_write_paused,
        )

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.connection_lost(error)
        self._on_connection_lost()

    def pause_writing(self) -> None:
        self._on_write_paused(True)

    def resume_writing(self) -> None:
        self._on_write_paused(False)

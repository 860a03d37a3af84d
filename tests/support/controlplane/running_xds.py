"""An xDS server without an engine, and the events that it emits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.config.settings import Settings
from controlplane.events.event_log import EventLog
from controlplane.grpc_auth import XdsPortService
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.plan import Policy
from controlplane.observe.fact_store import FactStore
from controlplane.xds.server import XdsServer


class RecordedEvents(EventLog):
    """An event log for tests. `recorded` has kind, subject and message of this replica's own events.

    `recorded_remote` has kind, subject, message and data of the events of other replicas.
    """

    def __init__(self) -> None:
        super().__init__(monotonic_unix_clock())
        self.recorded: list[tuple[str, str, str]] = []
        self.recorded_remote: list[tuple[str, str, str, Mapping[str, Any]]] = []

    def emit(self, kind: str, subject: str, message: str, data: Mapping[str, Any] = EMPTY_MAP) -> None:
        super().emit(kind, subject, message, data)
        self.recorded.append((kind, subject, message))

    def record_unforwarded(self, kind: str, subject: str, message: str, data: Mapping[str, Any]) -> None:
        super().record_unforwarded(kind, subject, message, data)
        self.recorded_remote.append((kind, subject, message, data))


def make_xds_server(
    settings: Settings, events: EventLog, services: Sequence[XdsPortService] = (), clock: Clock | None = None
) -> XdsServer:
    """Return a server with a fact store that nothing else uses."""
    return XdsServer(settings, clock or monotonic_unix_clock(), events, FactStore(events, Policy()), services)


@contextlib.asynccontextmanager
async def run_xds_server(server: XdsServer) -> AsyncIterator[XdsServer]:
    """Start a server, and stop it at the end of the block."""
    await server.start()
    run = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        run.cancel()
        await asyncio.wait({run})
        await server.stop()

"""The commands that run, and the calls of Envoys that wait for commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from controlplane.aio import wait_at_most
from controlplane.model.sessions import SessionResult


@dataclass(eq=False, slots=True)
class _RunningCommand:
    message: Any
    on_result: Callable[[SessionResult, Any], None]
    sent: set[str] = field(default_factory=set)  # Envoy processes


class CommandQueue:
    """Gives each command once to each Envoy process that asks for commands."""

    def __init__(self) -> None:
        self._running: dict[int, _RunningCommand] = {}
        self._waiting: set[asyncio.Event] = set()

    @contextmanager
    def run(self, message: Any, on_result: Callable[[SessionResult, Any], None]) -> Iterator[None]:
        """Run a `Command` during the block; `on_result` gets each result, and its message."""
        self._running[message.id] = _RunningCommand(message, on_result)
        for event in self._waiting:
            event.set()
        try:
            yield
        finally:
            self._running.pop(message.id, None)

    async def next_commands(self, instance: str, seconds: float) -> list[Any]:
        """Wait for commands for an Envoy process. Returns an empty list if there is none in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            while not (commands := self._take(instance)) and (rest := deadline - loop.time()) > 0:
                event.clear()
                await wait_at_most(event, rest)
            return commands
        finally:
            self._waiting.discard(event)

    def put_result(self, command: int, result: SessionResult, message: Any) -> None:
        """Pass a result on. Does nothing if the command has ended."""
        if (running := self._running.get(command)) is not None:
            running.on_result(result, message)

    def _take(self, instance: str) -> list[Any]:
        commands = []
        for running in self._running.values():
            if running.message.instance in ("", instance) and instance not in running.sent:
                running.sent.add(instance)
                commands.append(running.message)
        return commands

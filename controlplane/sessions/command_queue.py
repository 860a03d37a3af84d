"""The commands that run, and the calls of Envoys that wait for commands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from controlplane.aio import wait_at_most
from controlplane.model.sessions import SessionResult

_EARLY_SECONDS = 2.0  # how long the result of an unknown command is kept
_MAX_EARLY_RESULTS = 16


@dataclass(eq=False, slots=True)
class _RunningCommand:
    message: Any
    on_result: Callable[[SessionResult, Any], None]
    sent: set[str] = field(default_factory=set)  # Envoy processes


class CommandQueue:
    """Gives each command once to each Envoy process that asks for commands.

    A process has one poll at a time. An older one is left over from a connection that has broken.

    With replicas, an Envoy may get a command from one and bring its result to another one, to which the
    command is still on its way. So results of unknown commands wait for a moment.
    """

    def __init__(self) -> None:
        self._running: dict[int, _RunningCommand] = {}
        self._early_results: deque[tuple[int, SessionResult, Any]] = deque(maxlen=_MAX_EARLY_RESULTS)
        # The event of each process's newest poll; setting it makes the poll look for commands.
        self._polls: dict[str, asyncio.Event] = {}

    @contextmanager
    def run(self, message: Any, on_result: Callable[[SessionResult, Any], None]) -> Iterator[None]:
        """Run a `Command` during the block; `on_result` gets each result, and its message."""
        self._running[message.id] = _RunningCommand(message, on_result)
        for poll in self._polls.values():
            poll.set()
        for early, result, result_message in tuple(self._early_results):
            if early == message.id:
                on_result(result, result_message)
        try:
            yield
        finally:
            self._running.pop(message.id, None)

    async def next_commands(self, instance: str, seconds: float) -> list[Any]:
        """Wait for commands for an Envoy process.

        Returns an empty list if there is none in time, or when the process calls again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        poll = asyncio.Event()
        if (older := self._polls.get(instance)) is not None:
            older.set()
        self._polls[instance] = poll
        try:
            while self._polls.get(instance) is poll:
                if (commands := self._take(instance)) or (rest := deadline - loop.time()) <= 0:
                    return commands
                poll.clear()
                await wait_at_most(poll, rest)
            return []
        finally:
            if self._polls.get(instance) is poll:
                del self._polls[instance]

    def put_result(self, command: int, result: SessionResult, message: Any) -> None:
        """Pass a result on. If the command is unknown, it may have ended, or it is still to come."""
        if (running := self._running.get(command)) is not None:
            running.on_result(result, message)
            return
        early = command, result, message
        self._early_results.append(early)
        asyncio.get_running_loop().call_later(_EARLY_SECONDS, self._forget, early)

    def _forget(self, early: tuple[int, SessionResult, Any]) -> None:
        if early in self._early_results:
            self._early_results.remove(early)

    def _take(self, instance: str) -> list[Any]:
        commands = []
        for running in self._running.values():
            if running.message.instance in ("", instance) and instance not in running.sent:
                running.sent.add(instance)
                commands.append(running.message)
        return commands

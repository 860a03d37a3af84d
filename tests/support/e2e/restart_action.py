"""The action of a rollout in tests: a command that asks the test to restart a simulated server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from sandbox.tidb import Tidb
from tests.support.waiting import wait_until

NEW_VERSION = "v8.5.4"
ACTION = "restart"

# The control plane runs this command, which logs its start and then asks the test for the restart.
_SCRIPT = """
import json, os, socket, sys
port, log, address, version = sys.argv[1:]
named = {name: os.environ["TIDEVOY_" + name.upper()] for name in ("rollout", "node", "attempt")}
line = json.dumps({"address": address, "version": version, **named}) + "\\n"
file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(file, line.encode())
os.close(file)
with socket.create_connection(("127.0.0.1", int(port))) as test:
    test.sendall(line.encode())
    answer = test.makefile().readline().strip()
print(answer)
sys.exit(answer != "done")
"""


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of the command, as the command logs it. `version`: the rollout's target version."""

    address: str
    version: str
    rollout: str
    node: str
    attempt: str


RestartBehavior = Callable[[Tidb, CommandRun], Awaitable[str]]
"""Restarts a node or simulates a fault. Returns `done`, or the message with which the command fails."""


class RestartCommand:
    """Executes each run of the command: the behavior that a test has set for the node, or `default_behavior`.

    With `continues_when_killed`, a restart continues after the command is killed, as if another machine
    executed the restart. Otherwise the restart is canceled. `timeout`: of a run, in seconds.
    """

    def __init__(self, directory: Path, *, timeout: int = 60) -> None:
        self._timeout = timeout
        self._directory = directory
        self._script = directory / "restart.py"
        self._log = directory / "runs.log"
        self._server: asyncio.Server | None = None
        self._behaviors: dict[str, RestartBehavior] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes: Callable[[], Sequence[Tidb]] = list
        self.default_behavior: RestartBehavior = restart_node
        self.continues_when_killed = True
        self.interrupted_runs: list[CommandRun] = []
        self.active_addresses: set[str] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RestartCommand]:
        """Serve the commands during the block."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._script.write_text(_SCRIPT)
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The section `rollouts` of a configuration. Its action `restart` runs this command."""
        assert self._server is not None
        port = str(self._server.sockets[0].getsockname()[1])
        command = [
            sys.executable,
            "-I",
            "-S",
            str(self._script),
            port,
            str(self._log),
            "{address}",
            "{version}",
        ]
        return {"actions": {ACTION: {"command": command, "timeout": self._timeout}}}

    def set_behavior(self, address: str, behavior: RestartBehavior) -> None:
        """Set the behavior of the next runs for this node."""
        self._behaviors[address] = behavior

    async def wait_started(self, address: str) -> None:
        """Wait until a run of the command is executing the behavior of this node."""
        await wait_until(lambda: address in self.active_addresses, 30)

    def reset_behaviors(self) -> None:
        """Restore the default behavior for all nodes."""
        self._behaviors.clear()

    def runs(self, rollout: str | None = None) -> list[CommandRun]:
        """Return all runs of the command so far, or those of one rollout."""
        if not self._log.exists():
            return []
        runs = [CommandRun(**json.loads(line)) for line in self._log.read_text().splitlines()]
        return [run for run in runs if rollout in (None, run.rollout)]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            line = await reader.readline()
            if line:
                await self._serve(CommandRun(**json.loads(line)), reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(
        self, run: CommandRun, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        node = next(node for node in self.nodes() if node.address == run.address)
        behavior = asyncio.ensure_future(self._behaviors.get(run.address, self.default_behavior)(node, run))
        disconnected = asyncio.create_task(reader.read())
        self.active_addresses.add(run.address)
        try:
            await asyncio.wait({behavior, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not behavior.done():
                self.interrupted_runs.append(run)
                if not self.continues_when_killed:
                    behavior.cancel()
            with suppress(asyncio.CancelledError):
                result = await behavior
                writer.write(f"{result}\n".encode())
                with suppress(ConnectionError):
                    await writer.drain()
        finally:
            self.active_addresses.discard(run.address)
            behavior.cancel()
            disconnected.cancel()
            await asyncio.gather(behavior, disconnected, return_exceptions=True)


async def restart_node(node: Tidb, run: CommandRun) -> str:
    """Restart the node with the rollout's target version."""
    return await restart_with_version(run.version)(node, run)


def restart_with_version(version: str) -> RestartBehavior:
    """Return a behavior that restarts the node with `version`; if it is empty, with the current version."""

    async def restart(node: Tidb, run: CommandRun) -> str:
        await node.terminate()
        if version:
            node.arguments = (*_without_version(node.arguments), f"--version={version}")
        await node.launch()
        return "done"

    return restart


async def stop_node(node: Tidb, run: CommandRun) -> str:
    """Stop the node and never start it, although the command reports success."""
    await node.terminate()
    return "done"


def fail_with(message: str) -> RestartBehavior:
    """Return a behavior that does nothing, and fails the command with this message."""

    async def fail(node: Tidb, run: CommandRun) -> str:
        return message

    return fail


def wait_for_event(event: asyncio.Event, behavior: RestartBehavior = restart_node) -> RestartBehavior:
    """Return a behavior that waits for `event`, then executes `behavior`."""

    async def wait_first(node: Tidb, run: CommandRun) -> str:
        await event.wait()
        return await behavior(node, run)

    return wait_first


def _without_version(arguments: Sequence[str]) -> tuple[str, ...]:
    return tuple(argument for argument in arguments if not argument.startswith("--version="))


# --- REST API ---

ROLLOUT_REQUEST: Mapping[str, Any] = {
    "nodes": "all",
    "action": ACTION,
    "version": NEW_VERSION,
    "healthy_for_seconds": 1,
    "drain_deadline_seconds": 20,
    "return_deadline_seconds": 20,
}
"""The request of a fast rollout."""


async def start_rollout(api: httpx2.AsyncClient, **overrides: Any) -> str:
    """Start a rollout like ROLLOUT_REQUEST; return its id."""
    response = await api.post("/v1/rollouts", json={**ROLLOUT_REQUEST, **overrides})
    assert response.status_code == 201, response.text
    name: str = response.json()["id"]
    return name


async def get_rollout(api: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    """Return a rollout as the API shows it."""
    rollout: dict[str, Any] = (await api.get(f"/v1/rollouts/{name}")).raise_for_status().json()
    return rollout


async def wait_for_phase(
    api: httpx2.AsyncClient, name: str, *phases: str, seconds: float = 60.0
) -> dict[str, Any]:
    """Wait until the rollout is in one of these phases, and return it. Raises AssertionError on a timeout."""
    return await wait_for_rollout(api, name, lambda rollout: rollout["phase"] in phases, seconds)


async def wait_for_rollout(
    api: httpx2.AsyncClient, name: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 60.0
) -> dict[str, Any]:
    """Wait until the condition holds, and return the rollout. Raises AssertionError with its last state."""
    rollout: dict[str, Any] = {}
    try:
        async with asyncio.timeout(seconds):
            while not condition(rollout := await get_rollout(api, name)):  # noqa: ASYNC110 - polls on purpose
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"after {seconds:.0f} s: {json.dumps(rollout, indent=1)}") from None
    return rollout


def stage_by_node(rollout: Mapping[str, Any]) -> dict[str, str]:
    return {step["address"]: step["stage"] for step in rollout["steps"]}


async def control_rollout(api: httpx2.AsyncClient, name: str, action: str) -> dict[str, Any]:
    """Pause, resume or abort a rollout; return its new state."""
    response = await api.post(f"/v1/rollouts/{name}/{action}")
    assert response.status_code == 200, response.text
    rollout: dict[str, Any] = response.json()
    return rollout

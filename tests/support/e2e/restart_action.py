"""The action of a rollout in tests: a command that has a stand-in restarted, well or badly."""

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

# What the control plane runs: it notes first that it has begun, and then asks the test for the restart.
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
    """One run of the command, as it noted it itself. `version`: that the rollout wants."""

    address: str
    version: str
    rollout: str
    node: str
    attempt: str


RestartBehavior = Callable[[Tidb, CommandRun], Awaitable[str]]
"""What is done with a node; `done`, or the words with which the command fails."""


class RestartCommand:
    """Does for each run of the command what its node's deed is, `usual` unless the test says otherwise.

    `finishes`: a restart that has begun goes on when the command is killed meanwhile, as one does that was
    handed to another machine; else the node stays as it is at that moment.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._script = directory / "restart.py"
        self._log = directory / "runs.log"
        self._server: asyncio.Server | None = None
        self._behaviors: dict[str, RestartBehavior] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes: Callable[[], Sequence[Tidb]] = list
        self.default_behavior: RestartBehavior = restart_node
        self.survives_interruption = True
        self.interrupted_runs: list[CommandRun] = []
        self.active_addresses: set[str] = set()  # addresses

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RestartCommand]:
        """It answers the commands inside the block."""
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
        """The section `rollouts` of a configuration in which the action `restart` is this one."""
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
        return {"actions": {ACTION: {"command": command, "timeout": 60}}}

    def set_behavior(self, address: str, deed: RestartBehavior) -> None:
        """What the next runs do with this node."""
        self._behaviors[address] = deed

    async def wait_started(self, address: str) -> None:
        """Returns when a command has asked for that node, and its deed goes on."""
        await wait_until(lambda: address in self.active_addresses, 30)

    def reset_behaviors(self) -> None:
        """All nodes are restarted as usual from now on."""
        self._behaviors.clear()

    def runs(self, rollout: str | None = None) -> list[CommandRun]:
        """All runs of the command so far, or those of one rollout."""
        if not self._log.exists():
            return []
        noted = [CommandRun(**json.loads(line)) for line in self._log.read_text().splitlines()]
        return [run for run in noted if rollout in (None, run.rollout)]

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
        deed = asyncio.ensure_future(self._behaviors.get(run.address, self.default_behavior)(node, run))
        gone = asyncio.create_task(reader.read())
        self.active_addresses.add(run.address)
        try:
            await asyncio.wait({deed, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not deed.done():
                self.interrupted_runs.append(run)
                if not self.survives_interruption:
                    deed.cancel()
            with suppress(asyncio.CancelledError):
                said = await deed
                writer.write(f"{said}\n".encode())
                with suppress(ConnectionError):
                    await writer.drain()
        finally:
            self.active_addresses.discard(run.address)
            deed.cancel()
            gone.cancel()
            await asyncio.gather(deed, gone, return_exceptions=True)


async def restart_node(node: Tidb, run: CommandRun) -> str:
    """A restart with the version that the rollout wants."""
    return await restart_with_version(run.version)(node, run)


def restart_with_version(version: str) -> RestartBehavior:
    """A restart with this version; empty: with the one that it has."""

    async def deed(node: Tidb, run: CommandRun) -> str:
        await node.terminate()
        if version:
            node.arguments = (*_without_version(node.arguments), f"--version={version}")
        await node.launch()
        return "done"

    return deed


async def stop_node(node: Tidb, run: CommandRun) -> str:
    """The node is stopped and never started, although the command says that all went well."""
    await node.terminate()
    return "done"


def fail_with(message: str) -> RestartBehavior:
    """Nothing is done, and the command fails with these words."""

    async def deed(node: Tidb, run: CommandRun) -> str:
        return message

    return deed


def wait_for_event(event: asyncio.Event, behavior: RestartBehavior = restart_node) -> RestartBehavior:
    """The deed, once the event has come."""

    async def later(node: Tidb, run: CommandRun) -> str:
        await event.wait()
        return await behavior(node, run)

    return later


def _without_version(arguments: Sequence[str]) -> tuple[str, ...]:
    return tuple(argument for argument in arguments if not argument.startswith("--version="))


# --- what REST says ----------------------------------------------------------------------------------------

ROLLOUT_REQUEST: Mapping[str, Any] = {
    "nodes": "all",
    "action": ACTION,
    "version": NEW_VERSION,
    "healthy_for_seconds": 1,
    "drain_deadline_seconds": 20,
    "return_deadline_seconds": 20,
}
"""A rollout that hurries."""


async def start_rollout(api: httpx2.AsyncClient, **overrides: Any) -> str:
    """Start a rollout like ORDER; its id."""
    answer = await api.post("/v1/rollouts", json={**ROLLOUT_REQUEST, **overrides})
    assert answer.status_code == 201, answer.text
    name: str = answer.json()["id"]
    return name


async def get_rollout(api: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    """What is said of a rollout."""
    answer: dict[str, Any] = (await api.get(f"/v1/rollouts/{name}")).raise_for_status().json()
    return answer


async def wait_for_phase(
    api: httpx2.AsyncClient, name: str, *phases: str, seconds: float = 60.0
) -> dict[str, Any]:
    """The rollout, once it is in one of these phases. AssertionError with what it is when it never is."""
    return await wait_for_rollout(api, name, lambda rollout: rollout["phase"] in phases, seconds)


async def wait_for_rollout(
    api: httpx2.AsyncClient, name: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 60.0
) -> dict[str, Any]:
    """The rollout, once the condition holds. AssertionError with what it is when it does not in time."""
    rollout: dict[str, Any] = {}
    try:
        async with asyncio.timeout(seconds):
            while not condition(rollout := await get_rollout(api, name)):  # noqa: ASYNC110 - polls on purpose
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"after {seconds:.0f} s: {json.dumps(rollout, indent=1)}") from None
    return rollout


def stage_by_node(rollout: Mapping[str, Any]) -> dict[str, str]:
    """The stage of each node."""
    return {step["address"]: step["stage"] for step in rollout["steps"]}


async def control_rollout(api: httpx2.AsyncClient, name: str, action: str) -> dict[str, Any]:
    """Pause, resume or abort it; what it is then."""
    answer = await api.post(f"/v1/rollouts/{name}/{action}")
    assert answer.status_code == 200, answer.text
    rollout: dict[str, Any] = answer.json()
    return rollout

"""A cluster whose Envoys are replaced: who starts and stops them, sessions that work, and who connects."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext

import httpx2

from controlplane.xds.bootstrap.bootstrap import render
from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import Stack
from sandbox.tidb_sim.packets import Command
from tests.support.controlplane.cli_process import Outcome, finish, start
from tests.support.e2e.cluster import Client, client, code
from tests.support.module.bootstrap import found

_PAUSE = 0.02  # seconds between two statements of a session


@dataclass(slots=True)
class Service:
    """An Envoy under a supervisor: started and ended by commands that return at once, as systemd's do."""

    stack: Stack
    name: str
    admin: str  # host:port
    bootstrap: str
    starts: int = 0
    fifo: Path = field(init=False)
    process: EnvoyProcess = field(init=False)

    def __post_init__(self) -> None:
        self.fifo = self.stack.directory / f"{self.name}.fifo"
        self.process = EnvoyProcess(
            self.bootstrap, self.stack.directory / self.name, name=self.name, concurrency=2
        )

    def command(self, verb: str) -> str:
        """What an operator would write: `start` or `stop`."""
        return f"sh -c 'echo {verb} > {self.fifo}'"

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[Service]:
        """Obey the commands while the block runs."""
        os.mkfifo(self.fifo)
        # Also for writing, so that there is always a writer and it never reads as ended.
        inbox = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        waiting: asyncio.Queue[str] = asyncio.Queue()

        def heard() -> None:
            for verb in os.read(inbox, 4096).decode().split():
                waiting.put_nowait(verb)

        loop = asyncio.get_running_loop()
        loop.add_reader(inbox, heard)
        serving = asyncio.create_task(self._serve(waiting))
        try:
            yield self
            assert not serving.done(), serving
        finally:
            loop.remove_reader(inbox)
            os.close(inbox)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            if self.process.running:
                await self.process.terminate()
            self.process.ports.close()

    async def _serve(self, waiting: asyncio.Queue[str]) -> None:
        while True:
            match await waiting.get():
                case "start":
                    self.starts += 1
                    try:
                        await self.process.launch()
                    except ProcessFailed:
                        continue  # a supervisor's command has returned by then, too
                case "stop":
                    if self.process.running:
                        await self.process.terminate()


def service(
    stack: Stack, name: str, wrong: tuple[str, str] | None = None, *, admin: str | None = None
) -> Service:
    """One more Envoy of the cluster, not started. `wrong`: what stands in its bootstrap in place of what."""
    admin = admin or f"127.0.0.1:{stack.ports.take()}"
    right = render(
        stack.control_plane.parsed(),
        control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
        node_id=name,
        admin=admin,
        module=str(found()),
    )
    bootstrap = right if wrong is None else right.replace(wrong[1], wrong[0])
    assert wrong is None or bootstrap != right
    return Service(stack, name, admin, bootstrap)


def first(stack: Stack) -> str:
    """The admin port of the Envoy that the cluster was started with."""
    return f"127.0.0.1:{stack.advertised.admin}"


async def recycle(stack: Stack, old: str, new: str, *more: str) -> Outcome:
    """What `tidevoy envoys recycle` did."""
    return await finish(await recycling(stack, old, new, *more))


async def recycling(stack: Stack, old: str, new: str, *more: str) -> asyncio.subprocess.Process:
    """`tidevoy envoys recycle`, started."""
    arguments = ("envoys", "recycle", "--old-admin", old, "--new-admin", new, *more)
    return await start(stack.control_plane.api, *arguments)


async def accepts(admin: str) -> bool | None:
    """Whether the Envoy there accepts sessions; None: there is none."""
    try:
        async with httpx2.AsyncClient(trust_env=False, timeout=5.0) as http:
            page = await http.get(f"http://{admin}/stats", params={"filter": "listener_stopped"})
    except httpx2.TransportError:
        return None
    return page.text.strip().endswith(": 0")


class Session:
    """A session that works until it is told to end: text, prepared, or with nothing to do."""

    def __init__(self, own: Client, statement: bytes) -> None:
        self.own = own
        self._statement = statement  # the number of a prepared one; empty: text
        self.answers = 0
        self._ending = asyncio.Event()

    async def work(self) -> None:
        """Ask again and again. AssertionError, OSError, IncompleteReadError when an answer is not right."""
        while not self._ending.is_set():
            if self._statement:
                answer = await self.own.command(
                    Command.STMT_EXECUTE, self._statement + b"\0" + struct.pack("<I", 1)
                )
            else:
                answer = await self.own.query("do 1")
            assert code(answer) == 0
            self.answers += 1
            await asyncio.sleep(_PAUSE)
        self.own.ask(Command.QUIT)
        await self.own.rest()

    def end(self) -> None:
        """Let it leave by itself, as a client does."""
        self._ending.set()


@asynccontextmanager
async def working(
    port: int, count: int, trusting: SSLContext | None = None
) -> AsyncIterator[tuple[list[Session], list[asyncio.Task[None]]]]:
    """So many sessions: every other one prepares its statement, every third has TLS (with `trusting`)."""
    async with AsyncExitStack() as held:
        sessions = []
        for number in range(count):
            own = await held.enter_async_context(client(port))
            assert code(await own.enter(trusting=trusting if number % 3 == 0 else None)) == 0
            statement = b""
            if number % 2:
                statement = (await own.command(Command.STMT_PREPARE, b"do 1"))[1:5]
            sessions.append(Session(own, statement))
        tasks = [asyncio.create_task(session.work()) for session in sessions]
        try:
            yield sessions, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def unhurt(tasks: list[asyncio.Task[None]]) -> None:
    """None of these has failed; raises what one failed of."""
    for task in tasks:
        if task.done():
            task.result()


@dataclass(slots=True)
class Knocks:
    """What came of connecting all the time."""

    greeted: int = 0
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def knocking(port: int, at_once: int) -> AsyncIterator[Knocks]:
    """So many clients that connect, are greeted, and go, without a pause."""
    knocks = Knocks()
    stopping = asyncio.Event()

    async def knock() -> None:
        while not stopping.is_set():
            try:
                async with asyncio.timeout(20):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    try:
                        assert (await reader.readexactly(5))[4] == 10
                    finally:
                        writer.transport.abort()
            except (OSError, asyncio.IncompleteReadError, AssertionError) as error:
                knocks.failures.append(f"{type(error).__name__}: {error}")
            else:
                knocks.greeted += 1

    tasks = [asyncio.create_task(knock()) for _ in range(at_once)]
    try:
        yield knocks
    finally:
        stopping.set()
        await asyncio.gather(*tasks)

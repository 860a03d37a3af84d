"""Tools for tests that replace Envoys: a supervisor of Envoys, working sessions, and connection attempts."""

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

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.controlplane.cli_process import CliResult, start_tidevoy, wait_for_result
from tests.support.e2e.cluster import CountingClient, open_session
from tests.support.module.bootstrap import require_module
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

_PAUSE_SECONDS = 0.02  # Between two statements of a session.


@dataclass(slots=True)
class SupervisedEnvoy:
    """An Envoy that is started and stopped by commands, which return at once, like systemd's."""

    directory: Path
    name: str
    admin: str  # host:port
    bootstrap: str
    start_count: int = 0
    fifo: Path = field(init=False)
    process: EnvoyProcess = field(init=False)

    def __post_init__(self) -> None:
        self.fifo = self.directory / f"{self.name}.fifo"
        self.process = EnvoyProcess(self.bootstrap, self.directory / self.name, name=self.name, concurrency=2)

    def command(self, verb: str) -> str:
        """Return the operator's command that starts or stops this Envoy. `verb` is `start` or `stop`."""
        return f"sh -c 'echo {verb} > {self.fifo}'"

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[SupervisedEnvoy]:
        """Execute the commands during the block."""
        os.mkfifo(self.fifo)
        # Open the FIFO for writing too: while it has a writer, reads never return EOF.
        inbox = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        verbs: asyncio.Queue[str] = asyncio.Queue()

        def on_readable() -> None:
            for verb in os.read(inbox, 4096).decode().split():
                verbs.put_nowait(verb)

        loop = asyncio.get_running_loop()
        loop.add_reader(inbox, on_readable)
        serve_task = asyncio.create_task(self._serve(verbs))
        try:
            yield self
            assert not serve_task.done(), serve_task
        finally:
            loop.remove_reader(inbox)
            os.close(inbox)
            serve_task.cancel()
            await asyncio.gather(serve_task, return_exceptions=True)
            if self.process.is_running:
                await self.process.terminate()
            self.process.ports.close()

    async def _serve(self, commands: asyncio.Queue[str]) -> None:
        while True:
            match await commands.get():
                case "start":
                    self.start_count += 1
                    try:
                        await self.process.launch()
                    except ProcessFailed:
                        continue  # The start command has already returned, like systemd's.
                case "stop":
                    if self.process.is_running:
                        await self.process.terminate()


def make_supervised_envoy(
    stack: LocalCluster, name: str, *, admin: str | None = None, old_text: str = "", new_text: str = ""
) -> SupervisedEnvoy:
    """Create an Envoy without starting it. In its bootstrap, `new_text` replaces `old_text`, if given."""
    admin = admin or f"127.0.0.1:{stack.ports.allocate()}"
    bootstrap = render_bootstrap(
        stack.control_plane.parsed_settings(),
        control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
        node_id=name,
        admin=admin,
        module=str(require_module()),
    )
    if old_text:
        assert old_text in bootstrap
        bootstrap = bootstrap.replace(old_text, new_text)
    return SupervisedEnvoy(stack.directory, name, admin, bootstrap)


def first_admin_address(stack: LocalCluster) -> str:
    """Return the admin address of the cluster's first Envoy."""
    return f"127.0.0.1:{stack.advertised.admin}"


async def run_replacement(stack: LocalCluster, old: str, new: str, *more: str) -> CliResult:
    """Run `tidevoy envoys replace` and return its result."""
    return await wait_for_result(await start_replacement(stack, old, new, *more))


async def start_replacement(
    stack: LocalCluster, old: str, new: str, *more: str
) -> asyncio.subprocess.Process:
    """Start `tidevoy envoys replace`."""
    arguments = ("envoys", "replace", "--old-admin", old, "--new-admin", new, *more)
    return await start_tidevoy(stack.control_plane.api_url, *arguments)


async def accepts_sessions(admin: str) -> bool | None:
    """Return whether the Envoy accepts sessions, None if no Envoy answers."""
    try:
        async with http_client(timeout=5.0) as http:
            page = await http.get(f"http://{admin}/stats", params={"filter": "listener_stopped"})
    except httpx2.TransportError:
        return None
    return page.text.strip().endswith(": 0")


class WorkingSession:
    """A session that works until it is stopped, with text or prepared statements."""

    def __init__(self, client: CountingClient, statement: bytes) -> None:
        self.client = client
        self._statement = statement  # The id of a prepared statement; empty for text statements.
        self.answers = 0
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Run statements. Raises AssertionError after an error, OSError or EOFError after a disconnect."""
        while not self._ending.is_set():
            if self._statement:
                response = await self.client.send_command(
                    MySqlCommand.STMT_EXECUTE, self._statement + b"\0" + struct.pack("<I", 1)
                )
            else:
                response = await self.client.query("do 1")
            assert error_code(response) == 0
            self.answers += 1
            await asyncio.sleep(_PAUSE_SECONDS)
        self.client.write_command(MySqlCommand.QUIT)
        await self.client.read_to_end()

    def stop(self) -> None:
        """Make the session send COM_QUIT after its current statement."""
        self._ending.set()


@asynccontextmanager
async def run_working_sessions(
    port: int, count: int, tls: SSLContext | None = None
) -> AsyncIterator[tuple[list[WorkingSession], list[asyncio.Task[None]]]]:
    """Run `count` sessions. Every second session prepares its statement, every third uses `tls` if set."""
    async with AsyncExitStack() as exit_stack:
        sessions = []
        for number in range(count):
            client = await open_session(exit_stack, port, tls if number % 3 == 0 else None)
            statement = b""
            if number % 2:
                statement = (await client.send_command(MySqlCommand.STMT_PREPARE, b"do 1"))[1:5]
            sessions.append(WorkingSession(client, statement))
        tasks = [asyncio.create_task(session.run()) for session in sessions]
        try:
            yield sessions, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def expect_no_failures(tasks: list[asyncio.Task[None]]) -> None:
    """Raise the error of the first failed task, if any."""
    for task in tasks:
        if task.done():
            task.result()


async def wait_for_statements(
    sessions: list[WorkingSession], tasks: list[asyncio.Task[None]], count: int = 10
) -> None:
    """Wait until each session has received this many more answers. Raise the error of a failed session."""
    targets = [session.answers + count for session in sessions]

    def are_received() -> bool:
        expect_no_failures(tasks)
        return all(session.answers >= target for session, target in zip(sessions, targets, strict=True))

    await wait_until(are_received, 60)


@dataclass(slots=True)
class ConnectionAttempts:
    """Results of repeated connection attempts."""

    greeted: int = 0
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def connect_repeatedly(port: int, parallel: int) -> AsyncIterator[ConnectionAttempts]:
    """Run `parallel` clients that repeatedly connect, read the greeting and disconnect."""
    attempts = ConnectionAttempts()
    stopping = asyncio.Event()

    async def connect() -> None:
        while not stopping.is_set():
            try:
                async with asyncio.timeout(20):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    try:
                        assert (await reader.readexactly(5))[4] == 10
                    finally:
                        writer.transport.abort()
            except (OSError, asyncio.IncompleteReadError, AssertionError) as error:
                attempts.failures.append(f"{type(error).__name__}: {error}")
            else:
                attempts.greeted += 1

    tasks = [asyncio.create_task(connect()) for _ in range(parallel)]
    try:
        yield attempts
    finally:
        stopping.set()
        await asyncio.gather(*tasks)

"""The life of one stand-in: start, graceful shutdown in TiDB's order, crash.

Order of both: pingcap/tidb cmd/tidb-server/main.go and pkg/server/server.go.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from controlplane.address import join
from controlplane.etcd.client import EtcdClient
from sandbox.tidb_sim import mariadb_backend
from sandbox.tidb_sim.mariadb_backend import BackingUnavailable
from sandbox.tidb_sim.node import Node
from sandbox.tidb_sim.registration import Registration
from sandbox.tidb_sim.session import Session, SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import StatusServer
from sandbox.tidb_sim.stream import PacketStream

_REGISTER_SECONDS = 2.0
"""So long a start waits for the registration; then it serves all the same."""
_KILL_SECONDS = 1.0
_OVERDUE_SECONDS = 10.0
"""The statement SHUTDOWN sends SIGKILL so long after the graceful wait (pkg/executor/simple.go)."""
_STORAGE_RETRY_SECONDS = 0.2
_BACKLOG = 1024


class TidbSim:
    """One stand-in. Use `async with`, or `start` and `stop`; `crash` ends it as SIGKILL would.

    `die`: how a crash ends the process; without it a crash stays inside this object, for tests.
    """

    def __init__(self, settings: SimSettings, *, die: Callable[[], None] | None = None) -> None:
        self.settings = settings
        self._die = die
        self.node = Node(
            name="",
            release=settings.release,
            server_version=settings.version,
            labels=settings.labels,
            shut_down=self._shut_down_by_statement,
            crash=self.crash,
        )
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._status = StatusServer(self.node, settings)
        self._rules = settings.rules
        self._tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def sql_address(self) -> str:
        """`host:port` to connect to with SQL."""
        return join(_reachable(self.settings.host), self.node.sql_port)

    @property
    def status_address(self) -> str:
        """`host:port` of the status port."""
        return join(_reachable(self.settings.status_host), self.node.status_port)

    async def start(self) -> None:
        """Start; return once it serves SQL. OSError: a port is taken; ConfigError: a file of its TLS."""
        self._life = asyncio.create_task(self._live())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._life, ready}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.crash()
            raise
        finally:
            ready.cancel()
        if self._life.done():
            self._life.result()

    def begin_stop(self) -> None:
        """What SIGTERM does: begin the graceful shutdown, which `wait` sees the end of."""
        self._stop.set()

    async def wait(self) -> None:
        """Wait for the end, by a graceful shutdown or a crash."""
        if self._life is not None:
            await asyncio.wait({self._life})
            if not self._life.cancelled():
                self._life.result()

    async def stop(self) -> None:
        """Shut down gracefully, to the end."""
        self.begin_stop()
        await self.wait()

    def crash(self) -> None:
        """End at once; what is registered stays until its lease runs out."""
        if self._die is not None:
            self._die()
        self._stop_listening()
        for session in self._sessions:
            session.abort()
        if self._life is not None:
            self._life.cancel()

    async def _live(self) -> None:
        node, settings, rules = self.node, self.settings, self.settings.rules
        self._rules = _with_signer(settings)
        if rules.tls is not None:
            self._tls = rules.tls.context(demand=rules.require_secure_transport)
        with (
            _bound(settings.host, settings.port) as sql,
            _bound(settings.status_host, settings.status_port) as http,
        ):
            node.sql_port, node.status_port = sql.getsockname()[1], http.getsockname()[1]
            node.name = join(settings.advertise_address, node.sql_port)
            await self._status.start(http)
            try:
                await self._prepare_storage()
                await self._register_and_serve(sql)
            finally:
                self._stop_listening()
                if self._overdue is not None:
                    self._overdue.cancel()

    async def _prepare_storage(self) -> None:
        """TiDB does not come up without its storage either; `/status` says 500 meanwhile."""
        told = ""
        while not self._stop.is_set():
            try:
                await mariadb_backend.prepare(self.settings.rules.backing)
                return
            except BackingUnavailable as error:
                if str(error) != told:
                    told = str(error)
                    print(f"tidb_sim {self.node.name}: waiting, {told}", file=sys.stderr, flush=True)
            await asyncio.sleep(_STORAGE_RETRY_SECONDS)

    async def _register_and_serve(self, sql: socket.socket) -> None:
        if not self.settings.pd:
            await self._serve(sql)
            return
        async with EtcdClient(self.settings.pd, tls=self.settings.tls) as client:
            registration = Registration(client, self.node, self.settings)
            async with asyncio.TaskGroup() as tasks:
                registering = tasks.create_task(registration.run())
                # The keys appear before the SQL port answers: nobody may rely on them alone.
                await _at_most(_REGISTER_SECONDS, registration.written.wait())
                await self._serve(sql)
                registering.cancel()
            await registration.withdraw()

    async def _serve(self, sql: socket.socket) -> None:
        """Serve until told to stop, then shut down as TiDB does."""
        async with asyncio.TaskGroup() as tasks:

            def accept(stream: PacketStream) -> None:
                session = Session(self.node, self._rules, stream, self._tls)
                self._sessions[session] = task = tasks.create_task(session.run())
                task.add_done_callback(lambda _: self._sessions.pop(session))

            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: PacketStream(accept), sock=sql, backlog=_BACKLOG)
            self.node.serving = True
            self._ready.set()
            await self._stop.wait()
            self.node.stopping = True
            await asyncio.sleep(self.settings.graceful_wait)
            self.node.closing = True
            self._stop_listening()
            await self._drain()
            await self._kill_all()

    async def _drain(self) -> None:
        """Wait for sessions that execute something or are in a transaction; they end by themselves."""
        busy = {task for session, task in self._sessions.items() if session.busy}
        if busy:
            await asyncio.wait(busy, timeout=self.settings.drain)

    async def _kill_all(self) -> None:
        executing = [session.connection_id for session in self._sessions if session.busy]
        tasks = set(self._sessions.values())
        for session in list(self._sessions):
            session.kill()
        if executing:
            # Without this MariaDB goes on with a statement whose connection is gone.
            await _at_most(_KILL_SECONDS, _kill(self.settings, executing))
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_KILL_SECONDS)
            for task in stuck:
                task.cancel()

    def _shut_down_by_statement(self) -> None:
        if self._overdue is None:
            delay = self.settings.graceful_wait + _OVERDUE_SECONDS
            self._overdue = asyncio.get_running_loop().call_later(delay, self.crash)
        self.begin_stop()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        self._status.close()


def _with_signer(settings: SimSettings) -> SessionRules:
    """The rules with the key of session tokens, if there is one. ConfigError."""
    if not settings.signing_cert or not settings.signing_key:
        return settings.rules
    # Only here: a stand-in that signs nothing does without the package `cryptography`.
    from sandbox.tidb_sim.signing_key import load

    signer = load(Path(settings.signing_cert), Path(settings.signing_key))
    return replace(settings.rules, moves=replace(settings.rules.moves, signer=signer))


async def _kill(settings: SimSettings, connection_ids: Iterable[int]) -> None:
    try:
        await mariadb_backend.kill(settings.rules.backing, connection_ids)
    except BackingUnavailable:
        return  # its sessions have ended with it


async def _at_most(seconds: float, awaited: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await awaited
    except TimeoutError:
        return


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has its port and does not listen yet: connecting is refused."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)

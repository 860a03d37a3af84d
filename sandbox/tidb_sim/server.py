"""The lifecycle of one simulated server: start, graceful shutdown in TiDB's order, crash.

Order of the steps: pingcap/tidb cmd/tidb-server/main.go and pkg/server/server.go.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from controlplane.address import join
from controlplane.etcd.client import EtcdClient
from sandbox.tidb_sim import mariadb_backend
from sandbox.tidb_sim.mariadb_backend import BackendUnavailable
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.registration import Registration
from sandbox.tidb_sim.session import SimSession
from sandbox.tidb_sim.session_token import load_signer
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import StatusServer
from sandbox.tidb_sim.stream import PacketStream

_REGISTER_TIMEOUT_SECONDS = 2.0  # After that, the server serves although it is not registered yet.
_KILL_TIMEOUT_SECONDS = 1.0
_STORAGE_RETRY_SECONDS = 0.2
_BACKLOG = 1024


class TidbSim:
    """One simulated server. Use `async with`, or `start` and `stop`; `crash` stops it as SIGKILL would."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.node = SimNode(
            name="",
            release=settings.release,
            server_version=settings.version,
            labels=settings.labels,
        )
        self._sessions: dict[SimSession, asyncio.Task[None]] = {}
        self._status = StatusServer(self.node, settings)
        self._rules = settings.rules
        self._tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._ready = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._run_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def sql_address(self) -> str:
        """`host:port` for SQL connections."""
        return join(self.settings.host, self.node.sql_port)

    @property
    def status_address(self) -> str:
        """`host:port` of the status port."""
        return join(self.settings.status_host, self.node.status_port)

    async def start(self) -> None:
        """Start the server and wait until it serves SQL.

        Raises OSError if a port is taken or for a bad TLS file, ConfigError for a bad signing certificate.
        """
        self._run_task = asyncio.create_task(self._run())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._run_task, ready}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.crash()
            raise
        finally:
            ready.cancel()
        if self._run_task.done():
            self._run_task.result()

    def request_stop(self) -> None:
        """Start the graceful shutdown, as SIGTERM does. Use `wait` to wait for its end."""
        self._stop_requested.set()

    async def wait(self) -> None:
        """Wait until a graceful shutdown or a crash has ended."""
        if self._run_task is not None:
            await asyncio.wait({self._run_task})
            if not self._run_task.cancelled():
                self._run_task.result()

    async def stop(self) -> None:
        self.request_stop()
        await self.wait()

    def crash(self) -> None:
        """Stop at once. The registration remains until its lease expires."""
        self._stop_listening()
        for session in self._sessions:
            session.abort()
        if self._run_task is not None:
            self._run_task.cancel()

    async def _run(self) -> None:
        node, settings, rules = self.node, self.settings, self.settings.rules
        if settings.signing_cert and settings.signing_key:
            signer = load_signer(Path(settings.signing_cert), Path(settings.signing_key))
            self._rules = replace(rules, migration=replace(rules.migration, signer=signer))
        if rules.tls is not None:
            self._tls = rules.tls.create_context()
        with (
            _bind_socket(settings.host, settings.port) as sql,
            _bind_socket(settings.status_host, settings.status_port) as http,
        ):
            node.sql_port, node.status_port = sql.getsockname()[1], http.getsockname()[1]
            node.name = join(settings.advertise_address, node.sql_port)
            await self._status.start(http)
            try:
                await self._prepare_storage()
                await self._register_and_serve(sql)
            finally:
                self._stop_listening()

    async def _prepare_storage(self) -> None:
        """Wait for MariaDB, as TiDB waits for its storage. Meanwhile, `/status` returns 500."""
        last_error = ""
        while not self._stop_requested.is_set():
            try:
                await mariadb_backend.prepare_backend(self.settings.rules.backend)
                return
            except BackendUnavailable as error:
                if str(error) != last_error:
                    last_error = str(error)
                    print(f"tidb_sim {self.node.name}: waiting, {last_error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_STORAGE_RETRY_SECONDS)

    async def _register_and_serve(self, sql: socket.socket) -> None:
        if not self.settings.pd:
            await self._serve(sql)
            return
        async with EtcdClient(self.settings.pd) as client:
            registration = Registration(client, self.node, self.settings)
            async with asyncio.TaskGroup() as tasks:
                registration_task = tasks.create_task(registration.run())
                # The keys appear before the SQL port answers, as in TiDB: clients must not rely on the keys
                # alone.
                await _wait_at_most(_REGISTER_TIMEOUT_SECONDS, registration.registered.wait())
                await self._serve(sql)
                registration_task.cancel()
            await registration.deregister()

    async def _serve(self, sql: socket.socket) -> None:
        """Serve until a stop is requested, then shut down as TiDB does."""
        async with asyncio.TaskGroup() as tasks:

            def accept(stream: PacketStream) -> None:
                session = SimSession(self.node, self._rules, stream, self._tls)
                self._sessions[session] = task = tasks.create_task(session.run())
                task.add_done_callback(lambda _: self._sessions.pop(session))

            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: PacketStream(accept), sock=sql, backlog=_BACKLOG)
            self.node.is_serving = True
            self._ready.set()
            await self._stop_requested.wait()
            self.node.is_reporting_shutdown = True
            await asyncio.sleep(self.settings.graceful_wait)
            self.node.is_ending_idle_sessions = True
            self._stop_listening()
            await self._drain()
            await self._kill_all()

    async def _drain(self) -> None:
        """Wait until no session executes a statement or is in a transaction, or until the timeout."""
        busy = {task for session, task in self._sessions.items() if session.is_busy}
        if busy:
            await asyncio.wait(busy, timeout=self.settings.drain_timeout)

    async def _kill_all(self) -> None:
        executing = [session.connection_id for session in self._sessions if session.is_busy]
        tasks = set(self._sessions.values())
        for session in list(self._sessions):
            session.kill()
        if executing:
            # Otherwise, MariaDB would continue the statements after their connections are closed.
            killed = mariadb_backend.kill_connections(self.settings.rules.backend, executing)
            with suppress(BackendUnavailable):  # MariaDB has stopped, and its sessions with it.
                await _wait_at_most(_KILL_TIMEOUT_SECONDS, killed)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_KILL_TIMEOUT_SECONDS)
            for task in stuck:
                task.cancel()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        self._status.close()


async def _wait_at_most(seconds: float, awaited: Coroutine[Any, Any, object]) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(awaited, seconds)


def _bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet, so connections are refused."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound

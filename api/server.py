"""Run the engine and the REST API in one event loop, with an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.auth.acceptor import Acceptor
from api.auth.access_control import AccessController
from api.auth.http_protocol import EarlyAuthProtocol, uvicorn_options
from api.auth.security_headers import SecurityHeaders
from api.auth.tls import ReloadingServerContext
from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import CannotListen, ConfigError, TidevoyError

log = structlog.get_logger("tidevoy.serve")

_LISTEN_BACKLOG = 1024
_SHUTDOWN_GRACE_SECONDS = 3  # for responses in progress at a shutdown


async def serve(
    settings: Settings,
    load_settings: Callable[[], Settings],
    on_ready: Callable[[], None] | None = None,
    *,
    handle_signals: bool = False,
) -> None:
    """Run the control plane until cancelled.

    With `handle_signals`, SIGINT and SIGTERM also stop it, and SIGHUP reloads the settings. Signal handlers
    belong to the process, so only its main program may set this. `on_ready` is called once both ports are
    open. Raises TidevoyError if the control plane cannot start.
    """
    stop, hangup = asyncio.Event(), asyncio.Event()
    listener = await _open_listener("api.listen", settings.api.listen)
    engine = Engine(settings, load_settings=load_settings)
    try:
        # Check the port before gRPC opens it: gRPC writes to standard error and does not report the reason.
        if not settings.xds.listen.endswith(":0"):
            (await _open_listener("xds.listen", settings.xds.listen)).close()
        with _signal_handlers(stop, hangup) if handle_signals else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                engine_task = tasks.create_task(engine.run())
                api_task = tasks.create_task(_serve_api(engine, listener, on_ready))
                reload_task = tasks.create_task(_reload_on_hangup(engine, hangup))
                await stop.wait()
                # Stop the API first: while it finishes its responses, the engine must still run.
                for task in (reload_task, api_task, engine_task):
                    task.cancel()
                    await asyncio.wait({task})
    except BaseExceptionGroup as group:
        raise _unwrap_error(group) from None
    finally:
        listener.close()


async def _serve_api(engine: Engine, listener: socket.socket, on_ready: Callable[[], None] | None) -> None:
    """Serve the REST API until cancelled, then let the requests in progress finish."""
    await engine.wait_started()

    def on_started() -> None:
        host, port = listener.getsockname()[:2]
        log.info("the REST API is ready", address=addresses.join(host, port))
        if on_ready is not None:
            on_ready()

    app = create_app(engine)
    access: AccessController = app.state.access
    tls_files = engine.settings.api.tls
    certificate = None if tls_files is None else ReloadingServerContext(tls_files, access)
    server = _ApiServer(app, listener, access, certificate, on_started)
    async with contextlib.AsyncExitStack() as cleanups:
        console_task = asyncio.create_task(app.state.console.run())
        cleanups.callback(console_task.cancel)
        if certificate is not None:
            certificate_task = asyncio.create_task(certificate.reload_on_change())
            cleanups.callback(certificate_task.cancel)
        server_task = asyncio.create_task(server.serve())
        try:
            await asyncio.shield(server_task)
        finally:
            app.state.stopping.set()
            server.should_exit = True
            await server_task


class _ApiServer(uvicorn.Server):
    """uvicorn with our own acceptor, without its signal handlers. Calls `on_started` when it is ready."""

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        access: AccessController,
        certificate: ReloadingServerContext | None,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                SecurityHeaders(app),
                http=EarlyAuthProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # its warnings are about requests that are already counted as denied
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_SECONDS,
                **uvicorn_options(),
            )
        )
        self._listener, self._access, self._certificate = listener, access, certificate
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        certificate = self._certificate
        self._acceptor = Acceptor(
            self._listener,
            self._access,
            lambda on_close: EarlyAuthProtocol(self._access, on_close, self.config, self.server_state),
            lambda: None if certificate is None else certificate.context(),
        )
        self._acceptor.start()
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown([])

    def capture_signals(self) -> Any:
        return nullcontext()


async def _reload_on_hangup(engine: Engine, hangup: asyncio.Event) -> None:
    await engine.wait_started()  # before, there is nothing to apply settings to
    while True:
        await hangup.wait()
        hangup.clear()
        with suppress(ConfigError):  # the engine has logged it and keeps the old configuration
            await engine.reload()


async def _open_listener(key: str, address: str) -> socket.socket:
    """Open the port that the setting `key` names. Raises CannotListen if that fails."""
    host, port = addresses.split(address)
    try:
        candidates = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, endpoint = candidates[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(endpoint)
            listener.listen(_LISTEN_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        problem = error.strerror or str(error)
        raise CannotListen(key, address, problem.lower()) from None
    return listener


@contextmanager
def _signal_handlers(stop: asyncio.Event, hangup: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _unwrap_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error for the user if the group has only such errors; otherwise the group itself."""
    user_errors, unexpected = group.split(TidevoyError)
    if user_errors is None or unexpected is not None:
        return group
    first: BaseException = user_errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first

"""Run the engine and the REST API in one event loop, with an orderly shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import structlog
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.auth.tls import HttpProtocol, client_verify_mode, load_server_context
from controlplane import address as addresses
from controlplane.config.api import ApiSettings
from controlplane.config.reloading_certificates import CHECK_INTERVAL_SECONDS, ReloadingCertificates
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import ConfigError, ListenError, TidevoyError

log = structlog.get_logger("tidevoy.serve")

_LISTEN_BACKLOG = 1024
_MAX_HEAD_BYTES = 16_384
_KEEP_ALIVE_SECONDS = 60
_TCP_USER_TIMEOUT_MILLISECONDS = 60_000  # sent data may stay unacknowledged for this long
_SHUTDOWN_GRACE_SECONDS = 3  # for responses in progress at a shutdown
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: browsers would then send `Origin: null` for the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TLS_HEADERS = {"Strict-Transport-Security": "max-age=31536000"}


async def serve(
    settings: Settings,
    load_settings: Callable[[], Settings],
    on_ready: Callable[[], None] | None = None,
    *,
    handle_signals: bool = False,
) -> None:
    """Run the control plane until cancelled.

    With `handle_signals`, SIGINT and SIGTERM also stop it, and SIGHUP reloads the settings. Signal handlers
    belong to the process, so only its main program may set `handle_signals`. `on_ready` is called once both
    ports are open. Raises TidevoyError if the control plane cannot start.
    """
    stop, hangup = asyncio.Event(), asyncio.Event()
    listener = await _open_listener("api.listen", settings.api.listen)
    engine = Engine(settings, load_settings=load_settings)
    try:
        # Check the port before gRPC opens it: gRPC prints the reason of a failure and does not return it.
        if not settings.xds.listen.endswith(":0"):
            (await _open_listener("xds.listen", settings.xds.listen)).close()
        with _signal_handlers(stop, hangup) if handle_signals else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                engine_task = tasks.create_task(engine.run())
                api_task = tasks.create_task(_serve_api(engine, listener, on_ready))
                reload_task = tasks.create_task(_reload_on_hangup(engine, hangup))
                await stop.wait()
                # Stop the API first, because the engine must run until the API has finished its responses.
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
    app, api = create_app(engine), engine.settings.api
    server = uvicorn.Server(_uvicorn_config(app, api))
    app.state.access.connections.set_function(lambda: len(server.server_state.connections))
    # `uvicorn.Server.serve` would replace the process's signal handlers, so its steps are called here.
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(app.state.traffic_sampler.run())
        renewal: asyncio.Task[None] | None = None
        if api.tls is None:
            await server.startup(sockets=[listener])
        else:
            certificates = ReloadingCertificates(
                ("api", "tls"), api.tls, partial(load_server_context, api.tls), time.time, engine.events.emit
            )
            server.servers = []
            await _accept_with_tls(server, listener, certificates.current(), engine)
            renewal = tasks.create_task(_renew_certificates(server, listener, certificates, engine))
        host, port = listener.getsockname()[:2]
        log.info("the REST API is ready", address=addresses.join(host, port))
        if on_ready is not None:
            on_ready()
        try:
            await server.main_loop()
        finally:
            app.state.stopping.set()
            if renewal is not None:
                renewal.cancel()  # it must not open the port again
            await server.shutdown()


def _uvicorn_config(app: FastAPI, api: ApiSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # uvicorn's warnings are about invalid requests and too many connections
        access_log=False,
        server_header=False,
        headers=[*_SECURITY_HEADERS.items(), *(_TLS_HEADERS.items() if api.tls is not None else ())],
        proxy_headers=bool(api.trusted_proxies),
        forwarded_allow_ips=_with_mapped_networks(api.trusted_proxies),
        backlog=_LISTEN_BACKLOG,
        limit_concurrency=api.limits.connections,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_SECONDS,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )


def _with_mapped_networks(cidrs: Sequence[str]) -> list[str]:
    """Add the IPv4-mapped form of each IPv4 network, in which an IPv6 socket reports IPv4 peers."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    return [
        *cidrs,
        *(f"::ffff:{net.network_address}/{96 + net.prefixlen}" for net in networks if net.version == 4),
    ]


async def _renew_certificates(
    server: uvicorn.Server,
    listener: socket.socket,
    certificates: ReloadingCertificates[ssl.SSLContext],
    engine: Engine,
) -> None:
    """Use changed certificate files for new connections, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_SECONDS)
        await certificates.refresh()
        with suppress(OSError):  # no free file descriptor: try again after the next check
            await _accept_with_tls(server, listener, certificates.current(), engine)


async def _accept_with_tls(
    server: uvicorn.Server, listener: socket.socket, context: ssl.SSLContext, engine: Engine
) -> None:
    """Accept new connections with this context. Open connections and those in the backlog stay."""
    # With tokens, a client certificate is optional. A reload may have added or removed tokens.
    context.verify_mode = client_verify_mode(engine.settings.api)
    if context is not server.config.ssl:
        successor = listener.dup()
        server.config.ssl = context
        await _stop_accepting(server.servers)
        await server.startup(sockets=[successor])


async def _stop_accepting(acceptors: Sequence[asyncio.Server]) -> None:
    """Close the acceptors, but no connection that they have accepted.

    Between accept(2) and the creation of the transport, a connection belongs to a task. If the acceptor is
    closed then, Python 3.11 never serves the connection, and its client waits until it times out.
    """
    for acceptor in acceptors:
        for listener in acceptor.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
    await asyncio.sleep(0)  # these tasks run
    for acceptor in acceptors:
        acceptor.close()


async def _reload_on_hangup(engine: Engine, hangup: asyncio.Event) -> None:
    await engine.wait_started()  # settings cannot be applied before
    while True:
        await hangup.wait()
        hangup.clear()
        with suppress(ConfigError):  # the engine has logged it and keeps the old configuration
            await engine.reload()


async def _open_listener(key: str, address: str) -> socket.socket:
    """Open the port of `address`, which the setting `key` contains. Raises ListenError if that fails."""
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
            # Accepted connections inherit these options, which close the connections of vanished clients.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MILLISECONDS)
            listener.bind(endpoint)
            listener.listen(_LISTEN_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        problem = error.strerror or str(error)
        raise ListenError(key, address, problem.lower()) from None
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
    """Return the first error if the group contains only errors for the user, otherwise the group."""
    user_errors, unexpected = group.split(TidevoyError)
    if user_errors is None or unexpected is not None:
        return group
    first: BaseException = user_errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first

"""Takes connections to the REST API, paced, so that no flood of them keeps the control plane from its work.

asyncio's own acceptor takes as many as there are, before anything else in the loop has its turn.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

import structlog

from api.auth import kernel_filter
from api.auth.access_control import AccessController
from api.auth.rate_limit import TokenBucket
from api.auth.source_tracker import SourceTracker, source_key

log = structlog.get_logger("tidevoy.doors")

_MAX_ACCEPTS_PER_TURN = 8  # connections that are taken before others in the loop have their turn
_MAX_ACCEPTS_PER_SECOND = 2000.0  # connections that are looked at; to close one at once takes about 20 µs
_PAUSE_SECONDS = 0.005  # seconds until the next look when there were too many
_DESCRIPTOR_RETRY_SECONDS = 1.0  # seconds to wait when the process may open no more
_TLS_HANDSHAKE_TIMEOUT_SECONDS = 5.0  # seconds
_TCP_USER_TIMEOUT_MILLISECONDS = 60_000  # milliseconds without an acknowledgement of what we send

ProtocolFactory = Callable[[Callable[[], None]], asyncio.Protocol]


class _ConnectionSlot:
    """One connection in the count of its source, until it is left."""

    def __init__(self, sources: SourceTracker, source: str) -> None:
        self._sources, self._source = sources, source
        self._is_released = False

    def release(self) -> None:
        """The connection has ended; may be called again."""
        if not self._is_released:
            self._is_released = True
            self._sources.release_connection(self._source)


class Acceptor:
    """Takes connections from a listening socket until closed."""

    def __init__(
        self,
        listener: socket.socket,
        access: AccessController,
        make_protocol: ProtocolFactory,
        ssl_context: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """`make_protocol` gets what to call at the connection's end; `context` is asked for each."""
        self._listener, self._access = listener, access
        self._make_protocol, self._ssl_context = make_protocol, ssl_context
        self._loop = asyncio.get_running_loop()
        self._accept_rate = TokenBucket(_MAX_ACCEPTS_PER_SECOND * _PAUSE_SECONDS, access.now)
        self._opening_tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = self._has_warned = False

    def start(self) -> None:
        """Begin to take connections."""
        self._listener.setblocking(False)
        self._access.on_ban = self._apply_bans
        self._loop.add_reader(self._listener, self._accept_ready)

    def close(self) -> None:
        """Take no more. Connections that are open stay; those that are being opened are given up."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._access.on_ban = lambda: None
        for timer in self._timers.values():
            timer.cancel()
        for task in self._opening_tasks:
            task.cancel()

    def _accept_ready(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            if self._accept_rate.take(
                _MAX_ACCEPTS_PER_SECOND, _MAX_ACCEPTS_PER_SECOND * _PAUSE_SECONDS, self._access.now
            ):
                return self._pause(_PAUSE_SECONDS)
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError:
                return self._pause(_DESCRIPTOR_RETRY_SECONDS)
            source = source_key(peer[0])
            access = self._access
            if reason := access.sources.admit_connection(
                source, access.api.limits, access.now, requires_auth=access.requires_auth
            ):
                connection.close()
                if reason in ("banned", "connections", "strangers"):
                    access.count_rejected_connection(reason)
                else:
                    access.record_denial(peer[0], reason)
                continue
            self._start_connection(connection, _ConnectionSlot(access.sources, source), peer[0])
        return None

    def _start_connection(self, connection: socket.socket, slot: _ConnectionSlot, client_ip: str) -> None:
        """Make a transport of it, in a task of its own: with TLS, that is the handshake."""
        protocols: list[asyncio.Protocol] = []

        def protocol() -> asyncio.Protocol:
            protocols.append(self._make_protocol(slot.release))
            return protocols[0]

        def on_opened(task: asyncio.Task[None]) -> None:
            self._opening_tasks.discard(task)
            failed = task.cancelled() or task.exception() is not None
            if failed:
                slot.release()
            if not protocols:
                connection.close()  # else it is its transport's to close
            if failed and not task.cancelled():
                self._access.record_denial(client_ip, "handshake")

        task = self._loop.create_task(self._connect_transport(connection, protocol))
        self._opening_tasks.add(task)
        task.add_done_callback(on_opened)

    async def _connect_transport(
        self, connection: socket.socket, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """Any error that this ends with is the client's."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MILLISECONDS)
        context = self._ssl_context()
        limit = _TLS_HANDSHAKE_TIMEOUT_SECONDS if context is not None else None
        await self._loop.connect_accepted_socket(
            protocol, connection, ssl=context, ssl_handshake_timeout=limit
        )

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timers["pause"] = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept_ready)

    def _apply_bans(self) -> None:
        """Let the kernel keep out those that are shut out now, until the first of them is not any more."""
        now = self._access.now
        is_filtered = kernel_filter.drop_sources(self._listener, self._access.sources.banned_sources(now))
        if not is_filtered and not self._has_warned:
            self._has_warned = True
            log.warning("the kernel takes no filter for api.listen; who is shut out is closed here instead")
        if (timer := self._timers.pop("bans", None)) is not None:
            timer.cancel()
        if (end := self._access.sources.next_ban_end(now)) is not None:
            self._timers["bans"] = self._loop.call_later(end - now + 0.01, self._apply_bans)

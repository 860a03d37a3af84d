"""Accept connections to the REST API at a limited rate, so that a flood cannot starve the control plane.

asyncio's own acceptor accepts all waiting connections before any other task in the loop can run.
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

log = structlog.get_logger("tidevoy.auth")

_MAX_ACCEPTS_PER_CALLBACK = 8  # connections accepted before other tasks in the loop can run
_MAX_ACCEPTS_PER_SECOND = 2000.0  # accepting and closing a rejected connection takes about 20 µs
_PAUSE_SECONDS = 0.005  # pause after the accept rate was exceeded
_DESCRIPTOR_RETRY_SECONDS = 1.0  # pause when the process has no file descriptor left
_TLS_HANDSHAKE_TIMEOUT_SECONDS = 5.0
_TCP_USER_TIMEOUT_MILLISECONDS = 60_000  # sent data may stay unacknowledged for this long

ProtocolFactory = Callable[[Callable[[], None]], asyncio.Protocol]


class _ConnectionSlot:
    """One connection in the connection count of its source, until it is released."""

    def __init__(self, sources: SourceTracker, source: str) -> None:
        self._sources, self._source = sources, source
        self._is_released = False

    def release(self) -> None:
        """Remove the closed connection from the count. Further calls have no effect."""
        if not self._is_released:
            self._is_released = True
            self._sources.release_connection(self._source)


class Acceptor:
    """Accept connections from a listening socket until closed."""

    def __init__(
        self,
        listener: socket.socket,
        access: AccessController,
        make_protocol: ProtocolFactory,
        ssl_context: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """Create the acceptor.

        `make_protocol` receives the callback for the connection's end. `ssl_context` is called once per
        connection.
        """
        self._listener, self._access = listener, access
        self._make_protocol, self._ssl_context = make_protocol, ssl_context
        self._loop = asyncio.get_running_loop()
        self._accept_rate = TokenBucket(_MAX_ACCEPTS_PER_SECOND * _PAUSE_SECONDS, access.now)
        self._opening_tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = self._has_warned = False

    def start(self) -> None:
        """Start to accept connections."""
        self._listener.setblocking(False)
        self._access.on_ban = self._apply_bans
        self._loop.add_reader(self._listener, self._accept_ready)

    def close(self) -> None:
        """Stop accepting. Open connections stay; TLS handshakes in progress are cancelled."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._access.on_ban = lambda: None
        for timer in self._timers.values():
            timer.cancel()
        for task in self._opening_tasks:
            task.cancel()

    def _accept_ready(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_CALLBACK):
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
        """Create the transport in a task of its own, because with TLS this includes the handshake."""
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
                connection.close()  # otherwise the transport closes it
            if failed and not task.cancelled():
                self._access.record_denial(client_ip, "handshake")

        task = self._loop.create_task(self._connect_transport(connection, protocol))
        self._opening_tasks.add(task)
        task.add_done_callback(on_opened)

    async def _connect_transport(
        self, connection: socket.socket, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """Create the transport. Any exception is the client's fault."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MILLISECONDS)
        context = self._ssl_context()
        handshake_timeout = _TLS_HANDSHAKE_TIMEOUT_SECONDS if context is not None else None
        await self._loop.connect_accepted_socket(
            protocol, connection, ssl=context, ssl_handshake_timeout=handshake_timeout
        )

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timers["pause"] = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept_ready)

    def _apply_bans(self) -> None:
        """Install a kernel filter for the banned sources, and renew it when the next ban ends."""
        now = self._access.now
        is_filtered = kernel_filter.drop_sources(self._listener, self._access.sources.banned_sources(now))
        if not is_filtered and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the kernel rejects the socket filter for api.listen;"
                " connections from banned addresses are closed in user space"
            )
        if (timer := self._timers.pop("bans", None)) is not None:
            timer.cancel()
        if (ban_end := self._access.sources.next_ban_end(now)) is not None:
            self._timers["bans"] = self._loop.call_later(ban_end - now + 0.01, self._apply_bans)

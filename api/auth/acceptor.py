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
from api.auth.access_control import Doorkeeper
from api.auth.rate_limit import Bucket
from api.auth.source_tracker import Sources, source_of

log = structlog.get_logger("tidevoy.doors")

_IN_A_ROW = 8  # connections that are taken before others in the loop have their turn
_PER_SECOND = 2000.0  # connections that are looked at; to close one at once takes about 20 µs
_PAUSE = 0.005  # seconds until the next look when there were too many
_OUT_OF_DESCRIPTORS = 1.0  # seconds to wait when the process may open no more
_HANDSHAKE_WITHIN = 5.0  # seconds
_GIVEN_UP_AFTER = 60_000  # milliseconds without an acknowledgement of what we send

MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]


class _Place:
    """One connection in the count of its source, until it is left."""

    def __init__(self, sources: Sources, source: str) -> None:
        self._sources, self._source = sources, source
        self._is_left = False

    def leave(self) -> None:
        """The connection has ended; may be called again."""
        if not self._is_left:
            self._is_left = True
            self._sources.left(self._source)


class Acceptor:
    """Takes connections from a listening socket until closed."""

    def __init__(
        self,
        listener: socket.socket,
        keeper: Doorkeeper,
        make_protocol: MakeProtocol,
        context: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """`make_protocol` gets what to call at the connection's end; `context` is asked for each."""
        self._listener, self._keeper = listener, keeper
        self._make_protocol, self._context = make_protocol, context
        self._loop = asyncio.get_running_loop()
        self._pace = Bucket(_PER_SECOND * _PAUSE, keeper.now)
        self._opening: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = self._is_told = False

    def start(self) -> None:
        """Begin to take connections."""
        self._listener.setblocking(False)
        self._keeper.on_ban = self._bans_changed
        self._loop.add_reader(self._listener, self._take)

    def close(self) -> None:
        """Take no more. Connections that are open stay; those that are being opened are given up."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._keeper.on_ban = lambda: None
        for timer in self._timers.values():
            timer.cancel()
        for task in self._opening:
            task.cancel()

    def _take(self) -> None:
        for _ in range(_IN_A_ROW):
            if self._pace.take(_PER_SECOND, _PER_SECOND * _PAUSE, self._keeper.now):
                return self._pause(_PAUSE)
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError:
                return self._pause(_OUT_OF_DESCRIPTORS)
            source = source_of(peer[0])
            keeper = self._keeper
            if reason := keeper.sources.admits(source, keeper.api.limits, keeper.now, asks=keeper.asks):
                connection.close()
                if reason in ("banned", "connections", "strangers"):
                    keeper.turned_away(reason)
                else:
                    keeper.refused(peer[0], reason)
                continue
            self._open(connection, _Place(keeper.sources, source), peer[0])
        return None

    def _open(self, connection: socket.socket, place: _Place, origin: str) -> None:
        """Make a transport of it, in a task of its own: with TLS, that is the handshake."""
        made: list[asyncio.Protocol] = []

        def protocol() -> asyncio.Protocol:
            made.append(self._make_protocol(place.leave))
            return made[0]

        def opened(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            failed = task.cancelled() or task.exception() is not None
            if failed:
                place.leave()
            if not made:
                connection.close()  # else it is its transport's to close
            if failed and not task.cancelled():
                self._keeper.refused(origin, "handshake")

        task = self._loop.create_task(self._shake_hands(connection, protocol))
        self._opening.add(task)
        task.add_done_callback(opened)

    async def _shake_hands(self, connection: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Any error that this ends with is the client's."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVEN_UP_AFTER)
        context = self._context()
        limit = _HANDSHAKE_WITHIN if context is not None else None
        await self._loop.connect_accepted_socket(
            protocol, connection, ssl=context, ssl_handshake_timeout=limit
        )

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timers["pause"] = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._take)

    def _bans_changed(self) -> None:
        """Let the kernel keep out those that are shut out now, until the first of them is not any more."""
        now = self._keeper.now
        is_kept_out = kernel_filter.shut_out(self._listener, self._keeper.sources.banned(now))
        if not is_kept_out and not self._is_told:
            self._is_told = True
            log.warning("the kernel takes no filter for api.listen; who is shut out is closed here instead")
        if (timer := self._timers.pop("bans", None)) is not None:
            timer.cancel()
        if (end := self._keeper.sources.next_end(now)) is not None:
            self._timers["bans"] = self._loop.call_later(end - now + 0.01, self._bans_changed)

"""One connection: its first request is judged here, on its raw bytes, before HTTP's machinery looks at it.

A refusal costs some microseconds so, and ends the connection. It is a shortcut, never the judge: what passes
is parsed in full and judged again, with every request that follows on the connection (api.auth.middleware).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.auth.access_control import Doorkeeper
from api.auth.credentials import certificate_names, shown
from api.auth.policy import Asked, Refusal
from api.auth.security_headers import raw_answer

_HEAD_WITHIN = 10.0  # seconds from the first byte (or the connection) to the end of a request's head
_LAST_WORDS = 1.0  # seconds for which a refused client may still send, so that it gets to read why
_LARGEST_HEAD = 16_384  # bytes
_MOST_LINES = 128  # of a head; to parse 3,000 would take 10 ms
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 has it: some clients leave the CR out
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.[01]\r?\n")


class Gate(H11Protocol):
    """uvicorn's HTTP/1.1, behind a first look, with a limit of time for heads."""

    def __init__(
        self, keeper: Doorkeeper, leave: Callable[[], None], config: Config, state: ServerState
    ) -> None:
        """`leave` is called at the end."""
        super().__init__(config, state, {})
        self.conn = _Heads(h11.SERVER, _LARGEST_HEAD)
        self._keeper, self._leave = keeper, leave
        self._first = bytearray()
        self._is_admitted = self._is_refused = False
        self._origin = ""
        self._names: tuple[str, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._origin = peer[0] if isinstance(peer, tuple) else ""
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject):
            self._names = certificate_names(tls.getpeercert())
        # Each request's scope gets a copy: there the names are found again.
        self.app_state["certificate_names"] = self._names
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # it has its answer
        if not self._is_admitted:
            self._first += data
            is_whole = _is_whole(self._first)
            if is_whole is None:
                self._refuse_silently("head_too_large")
                return
            if self._first[0] > 0x20 and not is_whole:
                return
            if (refusal := self._judge(self._first)) is not None:
                self._refuse(refusal)
                return
            self._is_admitted = True
            data, self._first = bytes(self._first), bytearray()
        super().data_received(data)
        # No head is under way, or it has just begun: a client that never ends one would stay for ever.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            if self._timer is None:
                self._expect_head()
        else:
            self._rest()

    def send_400_response(self, msg: str) -> None:
        """Nothing that speaks HTTP: its answer is text, and it counts as a refusal."""
        self._keeper.refused(self._origin, "no_http")
        super().send_400_response(msg)

    def _judge(self, head: bytearray) -> Refusal | None:
        """Why the first request goes no further. What cannot be read here is left to the parser."""
        if not self._keeper.asks or (line := _REQUEST_LINE.match(head)) is None:
            return None
        method, target = line[1].decode("ascii"), line[2].partition(b"?")[0].decode("ascii")
        end = _END_OF_HEAD.search(head)
        fields = bytes(head[line.end() : end.start() if end else None]).split(b"\n")
        headers = [
            (name.strip().lower(), value.strip())
            for name, _, value in (each.partition(b":") for each in fields)
        ]
        named = dict(headers)
        asked = Asked(
            method,
            unquote(target),
            self._origin,
            shown(headers, self._names),
            wants_html=b"text/html" in named.get(b"accept", b""),
            by_htmx=named.get(b"hx-request") == b"true",
        )
        verdict = self._keeper.look(asked)
        # Callers that are known get their answer, and their audit event, from the middleware.
        return verdict if isinstance(verdict, Refusal) and verdict.caller is None else None

    def _refuse(self, refusal: Refusal) -> None:
        self._is_refused = True
        target = bytes(self._first).split(b" ", 2)[1].partition(b"?")[0]
        self._first = bytearray()
        self._keeper.refused(self._origin, refusal.reason, counts=refusal.counts)
        self._rest()
        self.transport.write(raw_answer(refusal, unquote(target.decode("ascii"))))
        # To close with unread bytes would reset the connection, and the client could lose its answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LAST_WORDS, self.transport.abort)

    def _refuse_silently(self, reason: str, *, counts: bool = True) -> None:
        self._is_refused = True
        self._keeper.refused(self._origin, reason, counts=counts)
        self._rest()
        self.transport.abort()

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(_HEAD_WITHIN, self._is_late)

    def _is_late(self) -> None:
        # Browsers open connections that they may need, and a person who uses one is no attacker.
        is_spare = not self._is_admitted and not self._first
        self._refuse_silently("slow_head", counts=not (is_spare and self._keeper.knows(self._origin)))

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Heads(h11.Connection):
    """HTTP/1.1 that has a limit also for heads that come in one piece, or behind another request."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and _is_whole(self.trailing_data[0]) is None:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return super().next_event()


def _is_whole(data: bytes | bytearray) -> bool | None:
    """Whether the head that these bytes begin with has its end among them; None: it is too large."""
    end = _END_OF_HEAD.search(data)
    size = len(data) if end is None else end.start()
    if size > _LARGEST_HEAD or data.count(b"\n", 0, size) > _MOST_LINES:
        return None
    return end is not None


def gate_options() -> dict[str, Any]:
    """What uvicorn's own configuration has to say so that gates work as written above."""
    return {"timeout_keep_alive": 60}

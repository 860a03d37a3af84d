"""The HTTP protocol of one connection: authorizes the first request on its raw bytes, before it is parsed.

A denial this early costs only some microseconds, and closes the connection. This is only a shortcut: a
request that passes is parsed in full and authorized again, like every later request on the connection
(api.auth.middleware).
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

from api.auth.access_control import AccessController
from api.auth.credentials import certificate_names, read_credentials
from api.auth.policy import AuthRequest, Denial
from api.auth.security_headers import raw_denial_response

_HEAD_TIMEOUT_SECONDS = 10.0  # from the first byte (or the connection) to the end of a request head
_LINGER_SECONDS = 1.0  # a denied client may still send for this long, so that it can read the response
_MAX_HEAD_BYTES = 16_384
_MAX_HEAD_LINES = 128  # parsing 3,000 lines would take 10 ms
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # the same as in h11: some clients omit the CR
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.[01]\r?\n")


class EarlyAuthProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with an early authorization check and a timeout for request heads."""

    def __init__(
        self, access: AccessController, on_close: Callable[[], None], config: Config, state: ServerState
    ) -> None:
        """Create the protocol. It calls `on_close` when the connection is lost."""
        super().__init__(config, state, {})
        self.conn = _LimitedH11Connection(h11.SERVER, _MAX_HEAD_BYTES)
        self._access, self._on_close = access, on_close
        self._head_buffer = bytearray()
        self._is_admitted = self._is_denied = False
        self._client_ip = ""
        self._certificate_names: tuple[str, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._client_ip = peer[0] if isinstance(peer, tuple) else ""
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject):
            self._certificate_names = certificate_names(tls.getpeercert())
        # uvicorn copies the state into the scope of each request, where the middleware reads the names.
        self.app_state["certificate_names"] = self._certificate_names
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._on_close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_denied:
            return  # the response has been sent
        if not self._is_admitted:
            self._head_buffer += data
            is_complete = _is_head_complete(self._head_buffer)
            if is_complete is None:
                self._abort_denied("head_too_large")
                return
            if self._head_buffer[0] > 0x20 and not is_complete:
                return
            if (denial := self._evaluate_head(self._head_buffer)) is not None:
                self._deny(denial)
                return
            self._is_admitted = True
            data, self._head_buffer = bytes(self._head_buffer), bytearray()
        super().data_received(data)
        # The next head has started: without a timeout, a client that never ends it could stay forever.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            if self._timer is None:
                self._start_head_timer()
        else:
            self._cancel_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a client that does not speak valid HTTP with plain text, and count it as a denial."""
        self._access.record_denial(self._client_ip, "no_http")
        super().send_400_response(msg)

    def _evaluate_head(self, head: bytearray) -> Denial | None:
        """Return the denial of the first request, or None. Heads not readable here are left to the parser."""
        if not self._access.requires_auth or (line := _REQUEST_LINE.match(head)) is None:
            return None
        method, target = line[1].decode("ascii"), line[2].partition(b"?")[0].decode("ascii")
        end = _END_OF_HEAD.search(head)
        header_lines = bytes(head[line.end() : end.start() if end else None]).split(b"\n")
        headers = [
            (name.strip().lower(), value.strip())
            for name, _, value in (header_line.partition(b":") for header_line in header_lines)
        ]
        header_by_name = dict(headers)
        request = AuthRequest(
            method,
            unquote(target),
            self._client_ip,
            read_credentials(headers, self._certificate_names),
            wants_html=b"text/html" in header_by_name.get(b"accept", b""),
            is_htmx=header_by_name.get(b"hx-request") == b"true",
        )
        verdict = self._access.evaluate(request)
        # The middleware answers authenticated callers and emits their audit events.
        return verdict if isinstance(verdict, Denial) and verdict.caller is None else None

    def _deny(self, denial: Denial) -> None:
        self._is_denied = True
        target = bytes(self._head_buffer).split(b" ", 2)[1].partition(b"?")[0]
        self._head_buffer = bytearray()
        self._access.record_denial(self._client_ip, denial.reason, penalize_source=denial.penalize_source)
        self._cancel_timer()
        self.transport.write(raw_denial_response(denial, unquote(target.decode("ascii"))))
        # Closing with unread bytes would reset the connection, and the client could lose the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _abort_denied(self, reason: str, *, penalize_source: bool = True) -> None:
        self._is_denied = True
        self._access.record_denial(self._client_ip, reason, penalize_source=penalize_source)
        self._cancel_timer()
        self.transport.abort()

    def _start_head_timer(self) -> None:
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_SECONDS, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        # Browsers open spare connections in advance; those of a trusted source are not an attack.
        is_spare = not self._is_admitted and not self._head_buffer
        self._abort_denied(
            "slow_head", penalize_source=not (is_spare and self._access.is_trusted(self._client_ip))
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _LimitedH11Connection(h11.Connection):
    """An h11 connection that also limits heads that arrive in one piece or behind another request."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and _is_head_complete(self.trailing_data[0]) is None:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return super().next_event()


def _is_head_complete(data: bytes | bytearray) -> bool | None:
    """Whether these bytes contain a complete request head; None: the head is too large."""
    end = _END_OF_HEAD.search(data)
    size = len(data) if end is None else end.start()
    if size > _MAX_HEAD_BYTES or data.count(b"\n", 0, size) > _MAX_HEAD_LINES:
        return None
    return end is not None


def uvicorn_options() -> dict[str, Any]:
    """Return the uvicorn settings that EarlyAuthProtocol needs."""
    return {"timeout_keep_alive": 60}

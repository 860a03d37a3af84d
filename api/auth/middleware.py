"""The judge of every request, on its parsed head; behind it, `scope["state"]["caller"]` tells who calls."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.auth.access_control import Doorkeeper
from api.auth.audit import Auditor
from api.auth.credentials import shown
from api.auth.policy import SAFE_METHODS, Asked, Refusal
from api.auth.security_headers import refusal_answer
from api.problems import Kind

# Bytes; 64 labels whose 512 characters each are written as escapes of 12 bytes are a bit less.
_LARGEST_BODY = 524_288
_LARGEST_LOGIN = 8_192  # of callers who may send nothing else
_MOST_READ = 4_194_304  # before a connection is closed whose request is too large
_BODY_WITHIN = 30.0  # seconds in which all of it has to come
_CLOSE = {"Connection": "close"}


class Doors:
    """Lets a request in, or answers it; tells of each write what became of it."""

    def __init__(self, app: ASGIApp, keeper: Doorkeeper, auditor: Auditor) -> None:
        self._app, self._keeper, self._auditor = app, keeper, auditor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        what = asked(scope)
        verdict = self._keeper.admit(what)
        writes = scope["method"] not in SAFE_METHODS
        if isinstance(verdict, Refusal):
            origin = scope["client"][0] if scope.get("client") else ""
            self._keeper.refused(origin, verdict.reason, counts=verdict.counts)
            if writes and verdict.caller is not None and verdict.kind is not Kind.TOO_MANY_REQUESTS:
                self._auditor.refused(scope, verdict.caller, verdict.kind.value.status)
            return await refusal_answer(Request(scope), verdict)(scope, receive, send)
        scope.setdefault("state", {})["caller"] = verdict
        if not writes:
            return await self._app(scope, receive, _While(self._keeper, what, send))
        status = 500  # what the caller gets when the app raises

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            return await self._app(scope, receive, seen)
        finally:
            self._auditor.ended(scope, verdict, status)


class _While:
    """Sends an answer as long as its caller may have it: one without end ends when a token is taken back."""

    def __init__(self, keeper: Doorkeeper, what: Asked, send: Send) -> None:
        self._keeper, self._what, self._send = keeper, what, send
        self._api = keeper.api
        self._is_over = False

    async def __call__(self, message: Message) -> None:
        if self._is_over:
            return
        if message.get("more_body") and self._keeper.api is not self._api:
            self._api = self._keeper.api
            if isinstance(self._keeper.look(self._what), Refusal):
                self._is_over = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)


def asked(scope: Scope) -> Asked:
    """The request, as the rules look at it."""
    headers = Headers(scope=scope)
    client = scope.get("client")
    return Asked(
        scope["method"],
        scope["path"],
        client[0] if client else "",
        shown(scope["headers"], scope.get("state", {}).get("certificate_names", ())),
        page=headers.get("origin"),
        host=headers.get("host", ""),
        is_tls=scope.get("scheme") == "https",
        wants_html="text/html" in headers.get("accept", ""),
        by_htmx=headers.get("hx-request") == "true",
    )


class LimitedBodies:
    """Request bodies are read whole, up to a limit of bytes and time, before anything else looks at them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        limit = _LARGEST_BODY if request.state.caller.may_write else _LARGEST_LOGIN
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(_BODY_WITHIN):
                # Also what is too large is read, up to a point: to answer at once and close the connection
                # could lose the answer, and to leave it open would let a client send on for ever.
                while more and size <= _MOST_READ:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None  # the client is gone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    more = message.get("more_body", False)
                    if size <= limit:
                        body += chunk
        except TimeoutError:
            detail = f"the request body did not come within {_BODY_WITHIN:g} s"
            late = problems.answer(request, Kind.TOO_SLOW, detail, headers=_CLOSE)
            return await late(scope, receive, send)
        if size > limit:
            detail = f"the request body is larger than {limit} bytes"
            large = problems.answer(request, Kind.TOO_LARGE, detail, headers=_CLOSE if more else None)
            return await large(scope, receive, send)
        whole = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        return await self._app(scope, replay, send)

"""ASGI middleware that authorizes every parsed request and sets `scope["state"]["caller"]`."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.auth.access_control import AccessController
from api.auth.audit import Auditor
from api.auth.credentials import read_credentials
from api.auth.policy import SAFE_METHODS, AuthRequest, Denial
from api.auth.security_headers import denial_response
from api.problems import ProblemKind

# Bytes. Enough for 64 labels of 512 characters, each character written as an escape of 12 bytes.
_MAX_BODY_BYTES = 524_288
_MAX_LOGIN_BODY_BYTES = 8_192  # for callers without write permission, who send only login forms
_MAX_DISCARDED_BYTES = 4_194_304  # of a body that is too large, before the connection is closed
_BODY_TIMEOUT_SECONDS = 30.0  # for the whole body
_CONNECTION_CLOSE = {"Connection": "close"}


class AuthMiddleware:
    """Admit a request or answer it with a denial, and record the outcome of each write."""

    def __init__(self, app: ASGIApp, access: AccessController, auditor: Auditor) -> None:
        self._app, self._access, self._auditor = app, access, auditor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = to_auth_request(scope)
        verdict = self._access.authorize(request)
        is_write = scope["method"] not in SAFE_METHODS
        if isinstance(verdict, Denial):
            client_ip = scope["client"][0] if scope.get("client") else ""
            self._access.record_denial(client_ip, verdict.reason, penalize_source=verdict.penalize_source)
            if is_write and verdict.caller is not None and verdict.kind is not ProblemKind.TOO_MANY_REQUESTS:
                self._auditor.record_denial(scope, verdict.caller, verdict.kind.value.status)
            return await denial_response(Request(scope), verdict)(scope, receive, send)
        scope.setdefault("state", {})["caller"] = verdict
        if not is_write:
            return await self._app(scope, receive, _RevocableSend(self._access, request, send))
        status = 500  # the response if the app raises

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            return await self._app(scope, receive, send_and_record_status)
        finally:
            self._auditor.record_write(scope, verdict, status)


class _RevocableSend:
    """Send a response until its caller loses access: then an endless stream ends at its next message."""

    def __init__(self, access: AccessController, request: AuthRequest, send: Send) -> None:
        self._access, self._request, self._send = access, request, send
        self._api_settings = access.api  # a reload replaces this object
        self._is_revoked = False

    async def __call__(self, message: Message) -> None:
        if self._is_revoked:
            return
        if message.get("more_body") and self._access.api is not self._api_settings:
            self._api_settings = self._access.api
            if isinstance(self._access.evaluate(self._request), Denial):
                self._is_revoked = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)


def to_auth_request(scope: Scope) -> AuthRequest:
    """Convert an ASGI scope into the request that the policy evaluates."""
    headers = Headers(scope=scope)
    client = scope.get("client")
    return AuthRequest(
        scope["method"],
        scope["path"],
        client[0] if client else "",
        read_credentials(scope["headers"], scope.get("state", {}).get("certificate_names", ())),
        origin_header=headers.get("origin"),
        host=headers.get("host", ""),
        is_tls=scope.get("scheme") == "https",
        wants_html="text/html" in headers.get("accept", ""),
        is_htmx=headers.get("hx-request") == "true",
    )


class BodyLimitMiddleware:
    """Read whole request bodies, limited in size and time, before the app receives them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        limit = _MAX_BODY_BYTES if request.state.caller.may_write else _MAX_LOGIN_BODY_BYTES
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
                # The rest of a body that is too large is read up to a limit: closing the connection at once
                # could lose the response, and reading to the end would let a client send forever.
                while more and size <= _MAX_DISCARDED_BYTES:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None  # the client has disconnected
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    more = message.get("more_body", False)
                    if size <= limit:
                        body += chunk
        except TimeoutError:
            detail = f"the request body was not received within {_BODY_TIMEOUT_SECONDS:g} s"
            timed_out = problems.problem_response(
                request, ProblemKind.TOO_SLOW, detail, headers=_CONNECTION_CLOSE
            )
            return await timed_out(scope, receive, send)
        if size > limit:
            detail = f"the request body is larger than {limit} bytes"
            too_large = problems.problem_response(
                request, ProblemKind.TOO_LARGE, detail, headers=_CONNECTION_CLOSE if more else None
            )
            return await too_large(scope, receive, send)
        messages = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        return await self._app(scope, replay, send)

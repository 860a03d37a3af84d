"""ASGI middleware that authorizes every request, sets `scope["state"]["caller"]`, and limits the body."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.auth.access_control import AccessController
from api.auth.audit import Auditor
from api.auth.credentials import read_credentials
from api.auth.policy import SAFE_METHODS, AuthRequest, Denial

# Bytes. Enough for 64 labels of 512 characters, each character written as an escape of 12 bytes.
_MAX_BODY_BYTES = 524_288
_MAX_LOGIN_BODY_BYTES = 8_192  # for callers without write permission, who send only login forms
_MAX_DISCARDED_BYTES = 4_194_304  # at most this much of a too large body is read and discarded
_NO_STORE = "no-store"


class AuthMiddleware:
    """Admit a request or answer it with a denial, and record the outcome of each write."""

    def __init__(self, app: ASGIApp, access: AccessController, auditor: Auditor) -> None:
        self._app, self._access, self._auditor = app, access, auditor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = to_auth_request(scope)
        verdict = self._access.admit(request)
        is_write = scope["method"] not in SAFE_METHODS
        if isinstance(verdict, Denial):
            self._access.record_denial(request.client_ip, verdict)
            if is_write and verdict.caller is not None:
                self._auditor.record_denial(scope, verdict.caller, verdict.kind.status)
            return await _denial_response(Request(scope), verdict)(scope, receive, send)
        scope.setdefault("state", {})["caller"] = verdict
        revocable_send = _RevocableSend(self._access, request, send)
        try:
            return await self._app(scope, receive, revocable_send)
        finally:
            if is_write:
                self._auditor.record_write(scope, verdict, revocable_send.status)


def _denial_response(request: Request, denial: Denial) -> Response:
    """Return the response to a denied request; it closes the connection unless the caller is known."""
    headers = {"Cache-Control": _NO_STORE, **denial.headers}
    if denial.caller is None:
        headers["Connection"] = "close"
    if denial.redirect_to is not None:
        return RedirectResponse(denial.redirect_to, 303, headers)
    return problems.problem_response(request, denial.kind, denial.detail, headers=headers)


class _RevocableSend:
    """Send an uncacheable response. If the caller loses access meanwhile, end the response."""

    def __init__(self, access: AccessController, request: AuthRequest, send: Send) -> None:
        self._access, self._request, self._send = access, request, send
        self._api_settings = access.api  # a reload replaces this object
        self._is_revoked = False
        self.status = 500  # the status if the app raises

    async def __call__(self, message: Message) -> None:
        if self._is_revoked:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).setdefault("Cache-Control", _NO_STORE)
        elif message.get("more_body") and self._access.api is not self._api_settings:
            self._api_settings = self._access.api
            if isinstance(self._access.authorize(self._request), Denial):
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
    """Answer a request with 413 when the app reads more of its body than the caller may send."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = _MAX_BODY_BYTES if scope["state"]["caller"].may_write else _MAX_LOGIN_BODY_BYTES
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size <= limit:
                return message
            # The rest is read up to a limit: closing the connection at once could lose the response, and
            # reading to the end would let a client send forever.
            while message.get("more_body") and size <= _MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
            headers = {"Connection": "close"} if message.get("more_body") else None
            raise HTTPException(413, f"the request body is larger than {limit} bytes", headers)

        return await self._app(scope, receive_limited, send)

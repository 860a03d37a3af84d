"""What the doors answer themselves: problems, and the headers that stand on every answer."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.auth.policy import Refusal

_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " object-src 'none'"
)
_ALWAYS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: a browser would then call the origin of our own forms `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ONLY_TLS = {"Strict-Transport-Security": "max-age=31536000"}
_NOT_KEPT = {"Cache-Control": "no-store"}


class Guarded:
    """Puts the headers on every answer that guard a browser which shows it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_ALWAYS)
                if scope["scheme"] == "https":
                    headers.update(_ONLY_TLS)
                if "cache-control" not in headers:
                    headers.update(_NOT_KEPT)
            await send(message)

        return await self._app(scope, receive, guarded)


def refusal_answer(request: Request, refusal: Refusal) -> Response:
    """The answer to a request that is not let in; the last on its connection, unless we know the caller."""
    headers = dict(refusal.headers)
    if refusal.caller is None or refusal.counts:
        headers["Connection"] = "close"
    if refusal.go_to is not None:
        return RedirectResponse(refusal.go_to, 303, headers)
    return problems.answer(request, refusal.kind, refusal.detail, headers=headers)


def raw_answer(refusal: Refusal, path: str) -> bytes:
    """The same as bytes, for a connection on which no request has been let in; it ends with it."""
    if refusal.go_to is not None:
        status, body, headers = "303 See Other", b"", {"Location": refusal.go_to}
    else:
        problem = problems.Problem(
            type=refusal.kind.type,
            title=refusal.kind.value.title,
            status=refusal.kind.value.status,
            detail=refusal.detail,
            instance=path,
            errors=None,
            reasons=None,
        )
        body = problem.model_dump_json(exclude_none=True).encode()
        status = f"{refusal.kind.value.status} {refusal.kind.name.replace('_', ' ').title()}"
        headers = {"Content-Type": problems.MEDIA_TYPE}
    headers = {
        **headers,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **_ALWAYS,
        **_NOT_KEPT,
        **refusal.headers,
    }
    head = "\r\n".join([f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body

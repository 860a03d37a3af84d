"""The security headers of every response, and the responses for denied requests."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.auth.policy import Denial

_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " object-src 'none'"
)
_SECURITY_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: browsers would then send `Origin: null` for the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TLS_HEADERS = {"Strict-Transport-Security": "max-age=31536000"}
_NO_STORE_HEADERS = {"Cache-Control": "no-store"}


class SecurityHeaders:
    """ASGI middleware that adds the security headers for browsers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_SECURITY_HEADERS)
                if scope["scheme"] == "https":
                    headers.update(_TLS_HEADERS)
                if "cache-control" not in headers:
                    headers.update(_NO_STORE_HEADERS)
            await send(message)

        return await self._app(scope, receive, send_with_headers)


def denial_response(request: Request, denial: Denial) -> Response:
    """Return the response to a denied request; it closes the connection unless the caller is known."""
    headers = dict(denial.headers)
    if denial.caller is None or denial.penalize_source:
        headers["Connection"] = "close"
    if denial.redirect_to is not None:
        return RedirectResponse(denial.redirect_to, 303, headers)
    return problems.problem_response(request, denial.kind, denial.detail, headers=headers)


def raw_denial_response(denial: Denial, path: str) -> bytes:
    """Return the response as raw bytes, for the first request of a connection, which it closes."""
    if denial.redirect_to is not None:
        status, body, headers = "303 See Other", b"", {"Location": denial.redirect_to}
    else:
        problem = problems.ProblemDetails(
            type=denial.kind.type,
            title=denial.kind.value.title,
            status=denial.kind.value.status,
            detail=denial.detail,
            instance=path,
            errors=None,
            reasons=None,
        )
        body = problem.model_dump_json(exclude_none=True).encode()
        status = f"{denial.kind.value.status} {denial.kind.name.replace('_', ' ').title()}"
        headers = {"Content-Type": problems.MEDIA_TYPE}
    headers = {
        **headers,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **_SECURITY_HEADERS,
        **_NO_STORE_HEADERS,
        **denial.headers,
    }
    head = "\r\n".join([f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body

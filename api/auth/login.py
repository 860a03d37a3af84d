"""`POST /login` and `POST /logout`: set or delete the cookie that holds a browser's token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from api.auth.access_control import AccessController
from api.auth.audit import Auditor
from api.auth.credentials import COOKIE_NAME, PresentedCredentials
from api.auth.policy import LOGIN_PATH, LOGOUT_PATH, AuthRequest, Denial
from api.dependencies import CallerDep

router = APIRouter(include_in_schema=False)

_MAX_FORM_FIELDS = 64


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a URL-encoded form; an empty dict if the body is not such a form."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        return {}
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FORM_FIELDS, errors="strict"))
    except ValueError:
        return {}


def safe_return_path(path: str) -> str:
    """Return `path` if it is a path on this server, else `/`; prevents open redirects after a login."""
    # Browsers read a backslash as a slash, drop control characters, and treat //host as another host.
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_local and path.isascii() and path.isprintable() and " " not in path else "/"


@router.post(LOGIN_PATH)
async def post_login(request: Request) -> RedirectResponse:
    """Check the token and redirect to the console, or back to the login page if the token is wrong."""
    access, auditor = _get_auth(request)
    fields = await read_form(request)
    return_path = safe_return_path(fields.get("next", "/"))
    if not access.requires_auth:
        return RedirectResponse(return_path, 303)
    client_ip = request.client.host if request.client is not None else ""
    token = fields.get("token", "").strip().encode()
    verdict = access.authorize(AuthRequest("GET", "/v1/nodes", client_ip, PresentedCredentials(bearer=token)))
    if isinstance(verdict, Denial):
        access.record_denial(client_ip, replace(verdict, reason="wrong_login"))
        retry_url = f"{LOGIN_PATH}?denied=1" + (
            f"&next={quote(return_path, safe='/')}" if return_path != "/" else ""
        )
        return RedirectResponse(retry_url, 303)
    auditor.record_login(verdict)
    response = RedirectResponse(return_path, 303)
    response.set_cookie(COOKIE_NAME, token.decode(), **_cookie_attributes(request))
    return response


@router.post(LOGOUT_PATH)
async def post_logout(request: Request, caller: CallerDep) -> RedirectResponse:
    """Delete the cookie and redirect to the login page."""
    access, auditor = _get_auth(request)
    if access.requires_auth:
        auditor.record_login(caller, "logout")
    response = RedirectResponse(f"{LOGIN_PATH}?signed_out=1", 303)
    response.delete_cookie(COOKIE_NAME, **_cookie_attributes(request))
    return response


def _cookie_attributes(request: Request) -> dict[str, Any]:
    return {"httponly": True, "samesite": "strict", "path": "/", "secure": request.url.scheme == "https"}


def _get_auth(request: Request) -> tuple[AccessController, Auditor]:
    state = request.app.state
    return state.access, state.auditor

"""`POST /login` and `POST /logout`: a browser trades a token for a cookie that holds it, or gives it back."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from api.auth.access_control import Doorkeeper
from api.auth.audit import Auditor
from api.auth.credentials import COOKIE, Shown
from api.auth.policy import LOGIN, LOGOUT, Asked, Refusal
from api.dependencies import TheCaller

router = APIRouter(include_in_schema=False)

_MOST_FIELDS = 64


async def form(request: Request) -> dict[str, str]:
    """The fields of a form as browsers send it; nothing when it is none."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        return {}
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict"))
    except ValueError:
        return {}


def local_path(wanted: str) -> str:
    """Where to go to after the login: a path of ours, whatever was asked for."""
    # Browsers read a backslash as a slash, drop control characters, and take //host for another host.
    is_ours = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted
    return wanted if is_ours and wanted.isascii() and wanted.isprintable() and " " not in wanted else "/"


@router.post(LOGIN)
async def post_login(request: Request) -> RedirectResponse:
    """Ends with the console, or with the login page again."""
    keeper, auditor = _doors(request)
    fields = await form(request)
    way_back = local_path(fields.get("next", "/"))
    if not keeper.asks:
        return RedirectResponse(way_back, 303)
    origin = request.client.host if request.client is not None else ""
    token = fields.get("token", "").strip().encode()
    verdict = keeper.look(Asked("GET", "/v1/nodes", origin, Shown(bearer=token)))
    if isinstance(verdict, Refusal):
        keeper.refused(origin, "wrong_login")
        again = f"{LOGIN}?refused=1" + (f"&next={quote(way_back, safe='/')}" if way_back != "/" else "")
        return RedirectResponse(again, 303)
    auditor.logged_in(verdict)
    answer = RedirectResponse(way_back, 303)
    answer.set_cookie(COOKIE, token.decode(), **_cookie(request))
    return answer


@router.post(LOGOUT)
async def post_logout(request: Request, caller: TheCaller) -> RedirectResponse:
    """Ends with the login page."""
    keeper, auditor = _doors(request)
    if keeper.asks:
        auditor.logged_in(caller, "logout")
    answer = RedirectResponse(f"{LOGIN}?left=1", 303)
    answer.delete_cookie(COOKIE, **_cookie(request))
    return answer


def _cookie(request: Request) -> dict[str, Any]:
    return {"httponly": True, "samesite": "strict", "path": "/", "secure": request.url.scheme == "https"}


def _doors(request: Request) -> tuple[Doorkeeper, Auditor]:
    state = request.app.state
    return state.doors, state.auditor

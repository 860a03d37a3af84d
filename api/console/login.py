"""The login page with the form for a token; api/auth/login.py handles the submitted form."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.console import pages

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def show_login(request: Request) -> Response:
    """Show the login page.

    `next` is the path to return to. `refused` marks a failed login, `left` a logout.
    """
    params = request.query_params
    return pages.page(
        request,
        "login.html",
        next_path=params.get("next", "/"),
        login_failed=params.get("refused") == "1",
        signed_out=params.get("left") == "1",
    )

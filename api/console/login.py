"""The page that asks for a token; what becomes of it is the doors' business (api/doors)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.console import pages

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def show_login(request: Request) -> Response:
    """`next`: where to go afterwards; `refused` and `left` say why one is here again."""
    params = request.query_params
    return pages.page(
        request,
        "login.html",
        then=params.get("next", "/"),
        refused=params.get("refused") == "1",
        left=params.get("left") == "1",
    )

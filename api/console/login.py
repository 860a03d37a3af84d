"""The page that asks for a token; what becomes of it is the doors' business (api/doors)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.console import pages

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def show_login(request: Request) -> Response:
    """`next`: where to go afterwards; `refused` and `left` say why one is here again."""
    asked = request.query_params
    return pages.page(
        request,
        "login.html",
        then=asked.get("next", "/"),
        refused=asked.get("refused") == "1",
        left=asked.get("left") == "1",
    )

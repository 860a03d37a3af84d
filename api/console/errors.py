"""Errors on a page or in a dialog, with the same text as the REST API's problem details."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

from api import problems
from api.console import pages
from api.problems import ProblemError
from controlplane.errors import TidevoyError

USER_ERRORS = (ProblemError, TidevoyError, RequestValidationError, ValidationError)
"""Errors whose text is meant for users; all other exceptions are bugs."""


class ConsoleRoute(APIRoute):
    """A route that shows user errors as pages. Other exceptions propagate to the server, which logs them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_page(request: Request) -> Response:
            try:
                return await handle(request)
            except USER_ERRORS as error:
                status, detail = await describe(request, error)
                if pages.is_dialog_request(request):
                    return pages.form_page(request, "_form_error.html", status, error=detail)
                return pages.page(request, "error.html", status, detail=detail)

        return handle_as_page


async def describe(request: Request, error: Exception) -> tuple[int, str]:
    """Return the HTTP status and text of an error, as in the REST API; re-raise errors that are bugs."""
    if isinstance(error, ValidationError):  # a form has an invalid value
        error = RequestValidationError(
            [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        )
    response = await problems.error_response(request, error)
    return response.status_code, json.loads(bytes(response.body))["detail"]

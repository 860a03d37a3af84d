"""Failures as people read them: the sentence that programs get as a problem, on a page or in a dialog."""

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
"""Failures that a person can be told of; all others are bugs."""


class ConsoleRoute(APIRoute):
    """A route whose failures are pages. What is a bug goes on to whoever logs it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_page(request: Request) -> Response:
            try:
                return await handle(request)
            except USER_ERRORS as error:
                status, detail = await describe(request, error)
                if pages.is_dialog_request(request):
                    return pages.form_page(request, "_refused.html", status, refused=detail)
                return pages.page(request, "error.html", status, detail=detail)

        return handle_as_page


async def describe(request: Request, error: Exception) -> tuple[int, str]:
    """Status and sentence of a failure, as the REST API has them; what is none of its is raised."""
    if isinstance(error, ValidationError):  # of a form
        error = RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
    answer = await problems.error_response(request, error)
    return answer.status_code, json.loads(bytes(answer.body))["detail"]

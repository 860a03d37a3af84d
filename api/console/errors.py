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

TELLABLE = (ProblemError, TidevoyError, RequestValidationError, ValidationError)
"""Failures that a person can be told of; all others are bugs."""


class ConsoleRoute(APIRoute):
    """A route whose failures are pages. What is a bug goes on to whoever logs it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_for_people(request: Request) -> Response:
            try:
                return await handle(request)
            except TELLABLE as error:
                status, detail = await told(request, error)
                if pages.in_dialog(request):
                    return pages.form(request, "_refused.html", status, refused=detail)
                return pages.page(request, "error.html", status, detail=detail)

        return handle_for_people


async def told(request: Request, error: Exception) -> tuple[int, str]:
    """Status and sentence of a failure, as the REST API has them; what is none of its is raised."""
    if isinstance(error, ValidationError):  # of a form
        error = RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
    answer = await problems.respond(request, error)
    return answer.status_code, json.loads(bytes(answer.body))["detail"]

"""HTML forms: read the submitted fields, and redisplay the form with an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from fastapi import Request, Response

from api.console.errors import USER_ERRORS, describe
from api.problems import ProblemError, ProblemKind

_MAX_FORM_FIELDS = 100

FormFields = Mapping[str, str]
Redisplay = Callable[[FormFields, int, str], Response]
"""Redisplays the form with the submitted fields, the HTTP status, and the error text."""


async def read(request: Request) -> FormFields:
    """Return the submitted fields, stripped of spaces and without empty ones. Raises ProblemError."""
    try:
        fields = parse_qsl((await request.body()).decode(), errors="strict", max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        raise ProblemError(ProblemKind.INVALID_REQUEST, "the form cannot be read; reload the page") from None
    return {name: text for name, value in fields if (text := value.strip())}


async def submit(
    request: Request, action: Callable[[FormFields], Awaitable[Response]], redisplay: Redisplay
) -> Response:
    """Run the action of a form; if it fails, redisplay the form with the error."""
    form = await read(request)
    try:
        return await action(form)
    except USER_ERRORS as error:
        status, detail = await describe(request, error)
        return redisplay(form, status, detail)


def number(form: FormFields, name: str, label: str, default: float) -> float:
    """Return the number in a field. Raises ProblemError if it is not a number."""
    try:
        return float(form[name]) if name in form else default
    except ValueError:
        raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: enter a number, such as 10") from None


def integer(form: FormFields, name: str, label: str, default: int) -> int:
    """Return the integer in a field. Raises ProblemError if it is not an integer."""
    value = number(form, name, label, float(default))
    if not value.is_integer():
        raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: enter a whole number, such as 1")
    return int(value)


def labels(form: FormFields, name: str) -> dict[str, str]:
    """Parse the labels in a field, written as `zone=a, disk=ssd`. Raises ProblemError if they are invalid."""
    parsed: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in form.get(name, "").split(","))):
        label, equals, value = part.partition("=")
        if not (label.strip() and equals):
            raise ProblemError(ProblemKind.INVALID_REQUEST, f"Labels: enter {part!r} as name=value")
        parsed[label.strip()] = value.strip()
    return parsed

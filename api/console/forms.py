"""What people fill in: read from a request, and shown again with what is wrong with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from fastapi import Request, Response

from api.console.errors import USER_ERRORS, describe
from api.problems import ProblemError, ProblemKind

_MAX_FORM_FIELDS = 100

FormFields = Mapping[str, str]
Redisplay = Callable[[FormFields, int, str], Response]
"""Shows the form again: with what was filled in, the HTTP status, and what is wrong."""


async def read(request: Request) -> FormFields:
    """The fields that were sent, without spaces around them; those that were left empty are not there."""
    try:
        fields = parse_qsl((await request.body()).decode(), errors="strict", max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        raise ProblemError(
            ProblemKind.INVALID_REQUEST, "the form cannot be read; load the page again"
        ) from None
    return {name: text for name, value in fields if (text := value.strip())}


async def submit(
    request: Request, action: Callable[[FormFields], Awaitable[Response]], redisplay: Redisplay
) -> Response:
    """Do what a form asks for; when it fails, show the form again and say why."""
    form = await read(request)
    try:
        return await action(form)
    except USER_ERRORS as error:
        status, detail = await describe(request, error)
        return redisplay(form, status, detail)


def number(form: FormFields, name: str, label: str, default: float) -> float:
    """A number that was filled in."""
    try:
        return float(form[name]) if name in form else default
    except ValueError:
        raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: write a number, such as 10") from None


def integer(form: FormFields, name: str, label: str, default: int) -> int:
    """A whole number that was filled in."""
    value = number(form, name, label, float(default))
    if not value.is_integer():
        raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: write a whole number, such as 1")
    return int(value)


def labels(form: FormFields, name: str) -> dict[str, str]:
    """Labels as people write them: `zone=a, disk=ssd`."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in form.get(name, "").split(","))):
        label, equals, value = part.partition("=")
        if not (label.strip() and equals):
            raise ProblemError(ProblemKind.INVALID_REQUEST, f"Labels: write {part!r} as name=value")
        found[label.strip()] = value.strip()
    return found

"""What people fill in: read from a request, and shown again with what is wrong with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from fastapi import Request, Response

from api.console.errors import TELLABLE, told
from api.problems import Kind, ProblemError

_MOST_FIELDS = 100

Form = Mapping[str, str]
Again = Callable[[Form, int, str], Response]
"""Shows the form again: with what was filled in, the HTTP status, and what is wrong."""


async def read(request: Request) -> Form:
    """The fields that were sent, without spaces around them; those that were left empty are not there."""
    try:
        fields = parse_qsl((await request.body()).decode(), errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise ProblemError(Kind.INVALID_REQUEST, "the form cannot be read; load the page again") from None
    return {name: text for name, value in fields if (text := value.strip())}


async def attempt(request: Request, deed: Callable[[Form], Awaitable[Response]], again: Again) -> Response:
    """Do what a form asks for; when it fails, show the form again and say why."""
    form = await read(request)
    try:
        return await deed(form)
    except TELLABLE as error:
        status, detail = await told(request, error)
        return again(form, status, detail)


def number(form: Form, name: str, called: str, default: float) -> float:
    """A number that was filled in."""
    try:
        return float(form[name]) if name in form else default
    except ValueError:
        raise ProblemError(Kind.INVALID_REQUEST, f"{called}: write a number, such as 10") from None


def whole(form: Form, name: str, called: str, default: int) -> int:
    """A whole number that was filled in."""
    value = number(form, name, called, float(default))
    if not value.is_integer():
        raise ProblemError(Kind.INVALID_REQUEST, f"{called}: write a whole number, such as 1")
    return int(value)


def labels(form: Form, name: str) -> dict[str, str]:
    """Labels as people write them: `zone=a, disk=ssd`."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in form.get(name, "").split(","))):
        label, equals, value = part.partition("=")
        if not (label.strip() and equals):
            raise ProblemError(Kind.INVALID_REQUEST, f"Labels: write {part!r} as name=value")
        found[label.strip()] = value.strip()
    return found

"""HTML forms: read the submitted fields, and redisplay the form with an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl

from fastapi import Request, Response

from api.console.errors import USER_ERRORS, describe
from api.problems import ProblemError, ProblemKind
from controlplane.model.nodes import EMPTY_MAP

_MAX_FORM_FIELDS = 100


@dataclass(frozen=True, slots=True)
class Form:
    """The non-empty fields of a submitted form, without outer spaces, and the error that they caused."""

    fields: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    status: int = 200  # the HTTP status of the response that displays the form
    error: str = ""

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> Form:
        """Return the form with these names and values."""
        return cls({name: text for name, value in pairs if (text := value.strip())})

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def get(self, name: str, default: str = "") -> str:
        """Return the text in a field."""
        return self.fields.get(name, default)

    def number(self, name: str, label: str, default: float) -> float:
        """Return the number in a field. Raises ProblemError if it is not a number."""
        try:
            return float(self.fields.get(name, default))
        except ValueError:
            raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: enter a number, such as 10") from None

    def integer(self, name: str, label: str, default: int) -> int:
        """Return the integer in a field. Raises ProblemError if it is not an integer."""
        value = self.number(name, label, default)
        if not value.is_integer():
            raise ProblemError(ProblemKind.INVALID_REQUEST, f"{label}: enter a whole number, such as 1")
        return int(value)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels in a field, such as `zone=a, disk=ssd`. Raises ProblemError if one is invalid."""
        labels: dict[str, str] = {}
        for part in filter(None, map(str.strip, self.get(name).split(","))):
            label, equals, value = part.partition("=")
            if not (label.strip() and equals):
                raise ProblemError(ProblemKind.INVALID_REQUEST, f"Labels: enter {part!r} as name=value")
            labels[label.strip()] = value.strip()
        return labels


async def submit(
    request: Request,
    action: Callable[[Form], Awaitable[Response]],
    redisplay: Callable[[Form], Response],
) -> Response:
    """Run the action of a form; if it fails, redisplay the form with the error."""
    try:
        pairs = parse_qsl((await request.body()).decode(), errors="strict", max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        raise ProblemError(ProblemKind.INVALID_REQUEST, "the form cannot be read; reload the page") from None
    form = Form.from_pairs(pairs)
    try:
        return await action(form)
    except USER_ERRORS as error:
        status, detail = await describe(request, error)
        return redisplay(replace(form, status=status, error=detail))

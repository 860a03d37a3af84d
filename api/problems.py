"""Every failure as RFC 9457 `application/problem+json`: one table of kinds, one way to answer them.

`type` is a URN that never changes, so that programs can compare it; docs/reference/api.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from controlplane.errors import (
    ConfigError,
    ConfigErrors,
    EnvoyConnected,
    NeedsModule,
    NodeExists,
    RolloutRefused,
    TidevoyError,
    UnknownEnvoy,
    UnknownNode,
    UnknownRollout,
)

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class _Meaning:
    status: int
    title: str


class Kind(Enum):
    """The kinds of problems. The name in kebab case is the end of the `type` URN."""

    INVALID_REQUEST = _Meaning(422, "The request holds a value that cannot be used")
    BAD_CONFIGURATION = _Meaning(422, "The configuration cannot be used")
    UNKNOWN_NODE = _Meaning(404, "No node has that address")
    NODE_EXISTS = _Meaning(409, "The node is there already")
    UNKNOWN_ENVOY = _Meaning(404, "No Envoy has that id")
    ENVOY_CONNECTED = _Meaning(409, "The Envoy is connected, so it has not ended")
    NEEDS_MODULE = _Meaning(409, "It takes Tidevoy's module in every Envoy")
    UNKNOWN_ROLLOUT = _Meaning(404, "No rollout has that id")
    ROLLOUT_REFUSED = _Meaning(409, "The rollout cannot be started, or not be moved on, as things are")
    UNAUTHENTICATED = _Meaning(401, "It is not known who is calling")
    FORBIDDEN = _Meaning(403, "The caller may not do that")
    FOREIGN_ORIGIN = _Meaning(403, "A web page of another origin may not change anything")
    NOT_FOUND = _Meaning(404, "There is nothing at this path")
    METHOD_NOT_ALLOWED = _Meaning(405, "This path does not know that method")
    TOO_SLOW = _Meaning(408, "The request did not come in time")
    TOO_LARGE = _Meaning(413, "The request body is too large")
    UNSUPPORTED_MEDIA_TYPE = _Meaning(415, "The request body is not JSON")
    MISDIRECTED = _Meaning(421, "The host name that was asked for is not known here")
    TOO_MANY_REQUESTS = _Meaning(429, "The caller sends too many requests")
    INTERNAL = _Meaning(500, "Something went wrong inside the control plane")
    UNAVAILABLE = _Meaning(503, "It cannot be done at the moment")
    NOT_READY = _Meaning(503, "The control plane is not ready")

    @property
    def type(self) -> str:
        return f"urn:tidevoy:problem:{self.name.lower().replace('_', '-')}"


class FieldProblem(BaseModel):
    """One value that cannot be used."""

    field: str = Field(description="Path of the value in the request, e.g. `labels.zone`.")
    problem: str


class Problem(BaseModel):
    """A failure (RFC 9457)."""

    type: str = Field(description="What kind of problem it is; stable.")
    title: str = Field(description="The kind in words; the same for all problems of one type.")
    status: int = Field(description="The HTTP status, again.")
    detail: str = Field(description="What happened here, and what can be done.")
    instance: str | None = Field(None, description="The path that was asked for.")
    errors: list[FieldProblem] | None = Field(None, description="The values that cannot be used.")
    reasons: list[str] | None = Field(None, description="Each reason by itself.")


class ProblemError(Exception):
    """Raised by routes for problems that have no error type of their own in the control plane."""

    def __init__(self, kind: Kind, detail: str, *, reasons: list[str] | None = None) -> None:
        self.kind, self.detail, self.reasons = kind, detail, reasons
        super().__init__(detail)


def answer(
    request: Request,
    kind: Kind,
    detail: str,
    *,
    errors: list[FieldProblem] | None = None,
    reasons: list[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The response for one problem."""
    problem = Problem(
        type=kind.type,
        title=kind.value.title,
        status=kind.value.status,
        detail=detail,
        instance=request.url.path,
        errors=errors,
        reasons=reasons,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        kind.value.status,
        dict(headers) if headers else None,
        media_type=MEDIA_TYPE,
    )


def declared(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """What a route declares in OpenAPI for the problems that it may answer; 500 is always among them."""
    by_status: dict[int, list[str]] = {}
    for kind in (*kinds, Kind.INTERNAL):
        by_status.setdefault(kind.value.status, []).append(kind.value.title)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": "; or: ".join(titles), "content": content}
        for status, titles in sorted(by_status.items())
    }


def install(app: FastAPI) -> None:
    """Make the app answer every failure as a problem."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(TidevoyError, _on_tidevoy_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def respond(request: Request, error: Exception) -> JSONResponse:
    """The answer for a failure that a caller can be told of; any other is raised."""
    match error:
        case ProblemError():
            return await _on_problem(request, error)
        case TidevoyError():
            return await _on_tidevoy_error(request, error)
        case RequestValidationError():
            return await _on_invalid(request, error)
        case _:
            raise error


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return answer(request, error.kind, error.detail, reasons=error.reasons)


async def _on_tidevoy_error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case UnknownNode():
            return answer(request, Kind.UNKNOWN_NODE, str(error))
        case NodeExists():
            return answer(request, Kind.NODE_EXISTS, str(error))
        case NeedsModule():
            return answer(request, Kind.NEEDS_MODULE, str(error))
        case UnknownEnvoy():
            return answer(request, Kind.UNKNOWN_ENVOY, str(error))
        case EnvoyConnected():
            return answer(request, Kind.ENVOY_CONNECTED, str(error))
        case UnknownRollout():
            return answer(request, Kind.UNKNOWN_ROLLOUT, str(error))
        case RolloutRefused():
            return answer(request, Kind.ROLLOUT_REFUSED, str(error), reasons=list(error.problems))
        case ConfigError():
            each = error.errors if isinstance(error, ConfigErrors) else (error,)
            wrong = [FieldProblem(field=one.key or one.where, problem=one.problem) for one in each]
            return answer(request, Kind.BAD_CONFIGURATION, str(error), errors=wrong)
        case TidevoyError(retryable=True):
            return answer(request, Kind.UNAVAILABLE, str(error), headers={"Retry-After": "1"})
        case _:
            raise error


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = [_field_problem(entry) for entry in error.errors()]
    detail = "; ".join(f"{entry.field}: {entry.problem}" for entry in wrong)
    return answer(request, Kind.INVALID_REQUEST, detail, errors=wrong)


def _field_problem(entry: Mapping[str, Any]) -> FieldProblem:
    where, *path = entry["loc"]
    if entry["type"] == "json_invalid":
        return FieldProblem(field="body", problem=f"not JSON: {entry['ctx']['error']}")
    problem = str(entry["ctx"]["error"]) if entry["type"] == "value_error" else entry["msg"]
    if path and path[-1] == "[key]":  # pydantic's mark for what is wrong with a name, not with its value
        return FieldProblem(field=".".join(str(part) for part in path[:-1]), problem=f"as a name: {problem}")
    return FieldProblem(field=".".join(str(part) for part in path) or where, problem=problem)


_BY_STATUS = {404: Kind.NOT_FOUND, 405: Kind.METHOD_NOT_ALLOWED}


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    match _BY_STATUS.get(error.status_code):
        case Kind.NOT_FOUND:
            return answer(
                request, Kind.NOT_FOUND, f"there is nothing at {path}; /openapi.json lists all paths"
            )
        case Kind.METHOD_NOT_ALLOWED:
            allowed = ", ".join(_methods(request)) or (error.headers or {}).get("Allow", "")
            detail = f"{path} does not know {request.method}; it knows {allowed}"
            return answer(request, Kind.METHOD_NOT_ALLOWED, detail, headers={"Allow": allowed})
        case _:
            return answer(request, Kind.INVALID_REQUEST, "the request cannot be read", headers=error.headers)


def _methods(request: Request) -> list[str]:
    """All methods of the path: the framework names only those of the first route that has it."""
    route = request.scope.get("route")
    operations = request.app.openapi()["paths"].get(getattr(route, "path", None), {})
    return sorted(method.upper() for method in operations)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    # The server logs the error with its traceback; the caller learns nothing of our insides.
    return answer(request, Kind.INTERNAL, "this is a bug in Tidevoy; its log says more")

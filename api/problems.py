"""Errors as RFC 9457 `application/problem+json`: the table of problem types, and the exception handlers.

`type` is a URN that never changes, so that programs can compare it; docs/reference/api.md lists all of them.
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
class _ProblemType:
    status: int
    title: str


class ProblemKind(Enum):
    """The problem types. The name in kebab case is the last part of the `type` URN."""

    INVALID_REQUEST = _ProblemType(422, "The request contains an invalid value")
    BAD_CONFIGURATION = _ProblemType(422, "The configuration is invalid")
    UNKNOWN_NODE = _ProblemType(404, "No node has that address")
    NODE_EXISTS = _ProblemType(409, "The node already exists")
    UNKNOWN_ENVOY = _ProblemType(404, "No Envoy has that id")
    ENVOY_CONNECTED = _ProblemType(409, "The Envoy is still connected")
    NEEDS_MODULE = _ProblemType(409, "The operation requires Tidevoy's module in every Envoy")
    UNKNOWN_ROLLOUT = _ProblemType(404, "No rollout has that id")
    ROLLOUT_REFUSED = _ProblemType(409, "The rollout cannot be started or continued in the current state")
    UNAUTHENTICATED = _ProblemType(401, "The caller is not authenticated")
    FORBIDDEN = _ProblemType(403, "The caller is not authorized for this operation")
    FOREIGN_ORIGIN = _ProblemType(403, "A web page of another origin may not change anything")
    NOT_FOUND = _ProblemType(404, "This path does not exist")
    METHOD_NOT_ALLOWED = _ProblemType(405, "This path does not support that method")
    TOO_SLOW = _ProblemType(408, "The request was not received in time")
    TOO_LARGE = _ProblemType(413, "The request body is too large")
    UNSUPPORTED_MEDIA_TYPE = _ProblemType(415, "The request body is not JSON")
    MISDIRECTED = _ProblemType(421, "The requested host name is not allowed")
    TOO_MANY_REQUESTS = _ProblemType(429, "The caller sends too many requests")
    INTERNAL = _ProblemType(500, "An internal error occurred in the control plane")
    UNAVAILABLE = _ProblemType(503, "The operation is temporarily unavailable")
    NOT_READY = _ProblemType(503, "The control plane is not ready")

    @property
    def type(self) -> str:
        return f"urn:tidevoy:problem:{self.name.lower().replace('_', '-')}"


class FieldProblem(BaseModel):
    """One invalid value."""

    field: str = Field(description="Path of the value in the request, e.g. `labels.zone`.")
    problem: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="The problem type, a URN that never changes.")
    title: str = Field(description="Summary of the problem type; the same for all problems of one type.")
    status: int = Field(description="The HTTP status of the response.")
    detail: str = Field(description="What went wrong, and what to do.")
    instance: str | None = Field(None, description="The requested path.")
    errors: list[FieldProblem] | None = Field(None, description="The invalid values.")
    reasons: list[str] | None = Field(None, description="The reasons as a list.")


class ProblemError(Exception):
    """An error that a route raises when the control plane has no specific error class for the problem."""

    def __init__(self, kind: ProblemKind, detail: str, *, reasons: list[str] | None = None) -> None:
        self.kind, self.detail, self.reasons = kind, detail, reasons
        super().__init__(detail)


def problem_response(
    request: Request,
    kind: ProblemKind,
    detail: str,
    *,
    errors: list[FieldProblem] | None = None,
    reasons: list[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response for one problem."""
    problem = ProblemDetails(
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


def openapi_responses(*kinds: ProblemKind) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route for these problems; always includes 500."""
    by_status: dict[int, list[str]] = {}
    for kind in (*kinds, ProblemKind.INTERNAL):
        by_status.setdefault(kind.value.status, []).append(kind.value.title)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {
        status: {"description": "; or: ".join(titles), "content": content}
        for status, titles in sorted(by_status.items())
    }


def install(app: FastAPI) -> None:
    """Register the handlers that answer every error as a problem."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(TidevoyError, _on_tidevoy_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an error that is meant for callers; re-raise any other."""
    match error:
        case ProblemError():
            return await _on_problem(request, error)
        case TidevoyError():
            return await _on_tidevoy_error(request, error)
        case RequestValidationError():
            return await _on_validation_error(request, error)
        case _:
            raise error


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    return problem_response(request, error.kind, error.detail, reasons=error.reasons)


async def _on_tidevoy_error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case UnknownNode():
            return problem_response(request, ProblemKind.UNKNOWN_NODE, str(error))
        case NodeExists():
            return problem_response(request, ProblemKind.NODE_EXISTS, str(error))
        case NeedsModule():
            return problem_response(request, ProblemKind.NEEDS_MODULE, str(error))
        case UnknownEnvoy():
            return problem_response(request, ProblemKind.UNKNOWN_ENVOY, str(error))
        case EnvoyConnected():
            return problem_response(request, ProblemKind.ENVOY_CONNECTED, str(error))
        case UnknownRollout():
            return problem_response(request, ProblemKind.UNKNOWN_ROLLOUT, str(error))
        case RolloutRefused():
            return problem_response(
                request, ProblemKind.ROLLOUT_REFUSED, str(error), reasons=list(error.problems)
            )
        case ConfigError():
            errors = error.errors if isinstance(error, ConfigErrors) else (error,)
            field_problems = [
                FieldProblem(field=config_error.key or config_error.where, problem=config_error.problem)
                for config_error in errors
            ]
            return problem_response(request, ProblemKind.BAD_CONFIGURATION, str(error), errors=field_problems)
        case TidevoyError(retryable=True):
            return problem_response(
                request, ProblemKind.UNAVAILABLE, str(error), headers={"Retry-After": "1"}
            )
        case _:
            raise error


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    field_problems = [_field_problem(entry) for entry in error.errors()]
    detail = "; ".join(f"{entry.field}: {entry.problem}" for entry in field_problems)
    return problem_response(request, ProblemKind.INVALID_REQUEST, detail, errors=field_problems)


def _field_problem(entry: Mapping[str, Any]) -> FieldProblem:
    location, *path = entry["loc"]
    if entry["type"] == "json_invalid":
        return FieldProblem(field="body", problem=f"not JSON: {entry['ctx']['error']}")
    problem = str(entry["ctx"]["error"]) if entry["type"] == "value_error" else entry["msg"]
    if path and path[-1] == "[key]":  # pydantic's mark for an invalid key, as opposed to an invalid value
        return FieldProblem(
            field=".".join(str(part) for part in path[:-1]), problem=f"invalid name: {problem}"
        )
    return FieldProblem(field=".".join(str(part) for part in path) or location, problem=problem)


_KIND_BY_STATUS = {404: ProblemKind.NOT_FOUND, 405: ProblemKind.METHOD_NOT_ALLOWED}


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    match _KIND_BY_STATUS.get(error.status_code):
        case ProblemKind.NOT_FOUND:
            return problem_response(
                request, ProblemKind.NOT_FOUND, f"{path} does not exist; /openapi.json lists all paths"
            )
        case ProblemKind.METHOD_NOT_ALLOWED:
            allowed = ", ".join(_allowed_methods(request)) or (error.headers or {}).get("Allow", "")
            detail = f"{path} does not support {request.method}; it supports {allowed}"
            return problem_response(
                request, ProblemKind.METHOD_NOT_ALLOWED, detail, headers={"Allow": allowed}
            )
        case _:
            return problem_response(
                request, ProblemKind.INVALID_REQUEST, "the request cannot be read", headers=error.headers
            )


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of the path; the framework reports only those of the first matching route."""
    route = request.scope.get("route")
    operations = request.app.openapi()["paths"].get(getattr(route, "path", None), {})
    return sorted(method.upper() for method in operations)


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # The server logs the error with its traceback; the response must not reveal internals.
    detail = "this is a bug in Tidevoy; see the control plane's log for details"
    return problem_response(request, ProblemKind.INTERNAL, detail)
